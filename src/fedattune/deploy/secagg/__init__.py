"""Secure aggregation: the server learns sums over nodes, and no single node's numbers.

The protocol has four rounds and a check of the survivors: Bonawitz et al., Practical Secure Aggregation for
Privacy-Preserving Machine Learning (CCS 2017), the variant against a malicious server. `node.py` and `server.py` are
its two sides, without a network; `runtime.py` and `backend.py` put them behind a deployment's messages.
"""
