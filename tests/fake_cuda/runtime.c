/* A CUDA runtime with one device, no memory and no kernels.

   Preloaded, it takes the place of libcudart: streams, events and device properties work, host memory
   can be allocated and registered, and any allocation or kernel launch on the device fails. With it
   torch's CUDA build takes its CUDA code paths on a machine without a GPU, on FakeTensors. */

#include <cuda_runtime_api.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#define EXPORT __attribute__((visibility("default")))
#define STUB(name, ...) \
  EXPORT cudaError_t name(__VA_ARGS__) { return cudaSuccess; }

static char handle[64];

STUB(cudaSetDevice, int device)
STUB(cudaDeviceSynchronize, void)
STUB(cudaGetLastError, void)
STUB(cudaPeekAtLastError, void)
STUB(cudaStreamDestroy, cudaStream_t stream)
STUB(cudaStreamQuery, cudaStream_t stream)
STUB(cudaStreamSynchronize, cudaStream_t stream)
STUB(cudaStreamWaitEvent, cudaStream_t stream, cudaEvent_t event, unsigned flags)
STUB(cudaEventDestroy, cudaEvent_t event)
STUB(cudaEventQuery, cudaEvent_t event)
STUB(cudaEventRecord, cudaEvent_t event, cudaStream_t stream)
STUB(cudaEventRecordWithFlags, cudaEvent_t event, cudaStream_t stream, unsigned flags)
STUB(cudaEventSynchronize, cudaEvent_t event)
STUB(cudaThreadExchangeStreamCaptureMode, enum cudaStreamCaptureMode *mode)

STUB(cudaFuncSetAttribute, const void *function, enum cudaFuncAttribute attribute, int value)
EXPORT cudaError_t cudaFuncGetAttributes(struct cudaFuncAttributes *attributes, const void *function) {
  memset(attributes, 0, sizeof *attributes);
  return cudaSuccess;
}
EXPORT cudaError_t cudaGetDriverEntryPointByVersion(
    const char *symbol, void **function, unsigned version, unsigned long long flags, enum cudaDriverEntryPointQueryResult *result) {
  *function = NULL;
  *result = cudaDriverEntryPointSymbolNotFound;
  return cudaSuccess;
}

/* torch asks whether a device was ever used before it sets it: it was. */
EXPORT bool _ZN3c104cuda17hasPrimaryContextEa(signed char device) { return true; }
EXPORT int cuDevicePrimaryCtxGetState(int device, unsigned *flags, int *active) { *active = 1; return 0; }

EXPORT cudaError_t cudaGetDeviceCount(int *count) { *count = 1; return cudaSuccess; }
EXPORT cudaError_t cudaGetDevice(int *device) { *device = 0; return cudaSuccess; }
EXPORT cudaError_t cudaDriverGetVersion(int *version) { *version = CUDART_VERSION; return cudaSuccess; }
EXPORT cudaError_t cudaRuntimeGetVersion(int *version) { *version = CUDART_VERSION; return cudaSuccess; }
EXPORT cudaError_t cudaDeviceCanAccessPeer(int *can, int device, int peer) { *can = 0; return cudaSuccess; }

EXPORT cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *properties, int device) {
  memset(properties, 0, sizeof *properties);
  strcpy(properties->name, "NVIDIA H200");
  properties->major = 9;
  properties->multiProcessorCount = 132;
  properties->totalGlobalMem = 141ull << 30;
  properties->warpSize = 32;
  properties->maxThreadsPerMultiProcessor = 2048;
  properties->sharedMemPerBlockOptin = 227 << 10;
  properties->regsPerMultiprocessor = 65536;
  return cudaSuccess;
}

EXPORT cudaError_t cudaDeviceGetAttribute(int *value, enum cudaDeviceAttr attribute, int device) {
  *value = 1;
  return cudaSuccess;
}
EXPORT cudaError_t cudaMemGetInfo(size_t *available, size_t *total) {
  *available = *total = 141ull << 30;
  return cudaSuccess;
}
EXPORT cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest) {
  *least = 0;
  *greatest = -5;
  return cudaSuccess;
}
EXPORT cudaError_t cudaStreamGetPriority(cudaStream_t stream, int *priority) { *priority = 0; return cudaSuccess; }
EXPORT cudaError_t cudaStreamCreate(cudaStream_t *stream) { *stream = (cudaStream_t)malloc(64); return cudaSuccess; }
EXPORT cudaError_t cudaStreamCreateWithFlags(cudaStream_t *stream, unsigned flags) { return cudaStreamCreate(stream); }
EXPORT cudaError_t cudaStreamCreateWithPriority(cudaStream_t *stream, unsigned flags, int priority) {
  return cudaStreamCreate(stream);
}
EXPORT cudaError_t cudaStreamIsCapturing(cudaStream_t stream, enum cudaStreamCaptureStatus *status) {
  *status = cudaStreamCaptureStatusNone;
  return cudaSuccess;
}
EXPORT cudaError_t cudaStreamGetCaptureInfo(
    cudaStream_t stream, enum cudaStreamCaptureStatus *status, unsigned long long *id, cudaGraph_t *graph,
    const cudaGraphNode_t **dependencies, const cudaGraphEdgeData **edges, size_t *count) {
  *status = cudaStreamCaptureStatusNone;
  return cudaSuccess;
}
EXPORT cudaError_t cudaEventCreate(cudaEvent_t *event) { *event = (cudaEvent_t)handle; return cudaSuccess; }
EXPORT cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned flags) { return cudaEventCreate(event); }
EXPORT cudaError_t cudaEventElapsedTime(float *ms, cudaEvent_t begin, cudaEvent_t end) { *ms = 1; return cudaSuccess; }

/* Host memory. Overlapping ranges cannot be registered, as on a GPU. */
EXPORT cudaError_t cudaHostAlloc(void **pointer, size_t size, unsigned flags) {
  return posix_memalign(pointer, 4096, size) ? cudaErrorMemoryAllocation : cudaSuccess;
}
EXPORT cudaError_t cudaFreeHost(void *pointer) { free(pointer); return cudaSuccess; }

enum { RANGES = 1024 };
static struct { char *begin, *end; } registered[RANGES];

EXPORT cudaError_t cudaHostRegister(void *pointer, size_t size, unsigned flags) {
  char *begin = pointer, *end = begin + size;
  for (int i = 0; i < RANGES; i++)
    if (begin < registered[i].end && registered[i].begin < end) return cudaErrorHostMemoryAlreadyRegistered;
  for (int i = 0; i < RANGES; i++)
    if (!registered[i].end) {
      registered[i].begin = begin;
      registered[i].end = end;
      return cudaSuccess;
    }
  return cudaErrorMemoryAllocation;
}
EXPORT cudaError_t cudaHostUnregister(void *pointer) {
  for (int i = 0; i < RANGES; i++)
    if (registered[i].begin == pointer && registered[i].end) {
      registered[i].begin = registered[i].end = NULL;
      return cudaSuccess;
    }
  return cudaErrorHostMemoryNotRegistered;
}
EXPORT cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes *attributes, const void *pointer) {
  memset(attributes, 0, sizeof *attributes);
  attributes->type = cudaMemoryTypeUnregistered;
  return cudaSuccess;
}

/* Nothing real can be on the device. */
EXPORT cudaError_t cudaMalloc(void **pointer, size_t size) { return cudaErrorMemoryAllocation; }
EXPORT cudaError_t cudaFree(void *pointer) { return cudaSuccess; }
EXPORT cudaError_t cudaLaunchKernel(const void *function, dim3 grid, dim3 block, void **arguments, size_t memory, cudaStream_t stream) {
  return cudaErrorNotSupported;
}
EXPORT cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t size, enum cudaMemcpyKind kind, cudaStream_t stream) {
  return cudaErrorNotSupported;
}
