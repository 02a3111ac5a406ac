"""The ranks one model is spread over: how they find each other, stay together, exchange tensors, and end together."""
