/* Stands for NVIDIA's driver library while ggml's CUDA backend is linked, and is never installed. A function that is
   missing here shows as an undefined symbol when the backend is linked. */
#define STUB(name) \
    int name(void) { return 100; /* CUDA_ERROR_NO_DEVICE */ }
STUB(cuDeviceGet)
STUB(cuDeviceGetAttribute)
STUB(cuGetErrorString)
STUB(cuMemAddressFree)
STUB(cuMemAddressReserve)
STUB(cuMemCreate)
STUB(cuMemGetAllocationGranularity)
STUB(cuMemMap)
STUB(cuMemRelease)
STUB(cuMemSetAccess)
STUB(cuMemUnmap)
