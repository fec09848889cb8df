"""CPU kernels in C++: packed linear layers, paged attention, RMSNorm, rotary embedding with KV write.

    src/           one source, compiled once per instruction set; the best the CPU has is bound when loaded
    build.py       source → shared library, once per host (or in the image), under the cache directory
    library.py     the library's functions over torch tensors
    packed.py      a checkpoint's weights in the kernels' layout: one mapped file, shared by the host's workers
    decoder.py     the Llama family's forward pass over both

All of it is batch-invariant (design §6). Where it cannot run, gpu_worker/llama.py and torch do the same work, but
round no inputs.
"""
