"""What a pool hands out, and how other libraries take it: tensors, arrays, DLPack."""
