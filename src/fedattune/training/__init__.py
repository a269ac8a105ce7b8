"""Train one algorithm: `fit`, the round loop, evaluation, engines, backends and storage."""
