"""The tensors and arrays that a pool returns, and how other libraries read them: DLPack."""
