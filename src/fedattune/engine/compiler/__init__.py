"""Record local steps as flat lists of tensor operations, make them cheaper, and replay them."""
