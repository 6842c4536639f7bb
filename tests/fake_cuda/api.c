/* api.c: devices, errors, NVML, and the calls that nobody may make. */
#define _GNU_SOURCE
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "fake.h"

API int cudaRuntimeGetVersion(int *version) {
  ENTER;
  *version = FAKE_CUDART_VERSION;
  return fake_leave(OK);
}

API int cudaGetDeviceCount(int *count) {
  ENTER;
  *count = FAKE_DEVICES;
  return fake_leave(OK);
}

API int cudaGetDevice(int *device) {
  ENTER;
  *device = fake_device;
  return fake_leave(OK);
}

API int cudaSetDevice(int device) {
  static int id_of_call = -1;
  int before = fake_device;
  if (device < 0 || device >= FAKE_DEVICES) return INVALID_DEVICE;
  fake_device = device;
  int error = fake_enter(&id_of_call, __func__, 0);
  if (error) fake_device = before;
  return fake_leave(error);
}

API int cudaDeviceGetPCIBusId(char *name, int length, int device) {
  ENTER;
  snprintf(name, (size_t)length, "0000:%02X:00.0", 0x40 + device);
  return fake_leave(OK);
}

API int cudaDeviceGetByPCIBusId(int *device, const char *name) {
  ENTER;
  unsigned bus = 0;
  if (sscanf(name, "0000:%x:00.0", &bus) != 1 || bus < 0x40 || bus >= 0x40 + FAKE_DEVICES)
    return fake_leave(INVALID_DEVICE);
  *device = (int)bus - 0x40;
  return fake_leave(OK);
}

API const char *cudaGetErrorName(int error) {
  static const struct { int error; const char *name; } names[] = {
      {OK, "cudaSuccess"},
      {INVALID_VALUE, "cudaErrorInvalidValue"},
      {OUT_OF_MEMORY, "cudaErrorMemoryAllocation"},
      {NOT_INITIALIZED, "cudaErrorInitializationError"},
      {INVALID_HANDLE, "cudaErrorInvalidResourceHandle"},
      {NOT_READY, "cudaErrorNotReady"},
      {ILLEGAL_ADDRESS, "cudaErrorIllegalAddress"},
      {LAUNCH_FAILURE, "cudaErrorLaunchFailure"},
  };
  for (size_t i = 0; i < sizeof names / sizeof *names; i++)
    if (names[i].error == error) return names[i].name;
  return "cudaErrorUnknown";
}

API int cudaGetLastError(void) { return OK; }

/* ---- NVML ----------------------------------------------------------------------------------------------- */

typedef struct { unsigned long long total, free, used; } nvml_memory;

API int nvmlInit_v2(void) {
  ENTER;
  return fake_leave(OK);
}

API int nvmlShutdown(void) {
  ENTER;
  return fake_leave(OK);
}

API int nvmlDeviceGetCount_v2(unsigned *count) {
  ENTER;
  *count = FAKE_DEVICES;
  return fake_leave(OK);
}

API int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **device) {
  ENTER;
  *device = (void *)(uintptr_t)(index + 1);
  return fake_leave(OK);
}

API int nvmlDeviceGetName(void *device, char *name, unsigned length) {
  ENTER;
  snprintf(name, length, "Fake GPU %d", (int)(uintptr_t)device - 1);
  return fake_leave(OK);
}

API int nvmlDeviceGetMemoryInfo(void *device, nvml_memory *memory) {
  ENTER;
  (void)device;
  *memory = (nvml_memory){8ull << 30, 8ull << 30, 0};
  return fake_leave(OK);
}

/* ---- what would stop the event loop --------------------------------------------------------------------- */

#define FORBIDDEN(name)                                                               \
  API int name(void) {                                                                \
    fprintf(stderr, "fake CUDA: " #name " was called; nothing may be waited for\n"); \
    abort();                                                                          \
  }
FORBIDDEN(cudaDeviceSynchronize)
FORBIDDEN(cudaStreamSynchronize)
FORBIDDEN(cudaEventSynchronize)
FORBIDDEN(cudaThreadSynchronize)
FORBIDDEN(cudaMemcpy)
FORBIDDEN(cudaMemcpy2D)
FORBIDDEN(cudaDeviceReset)
FORBIDDEN(cuCtxSynchronize)
FORBIDDEN(cuStreamSynchronize)
FORBIDDEN(cuEventSynchronize)
