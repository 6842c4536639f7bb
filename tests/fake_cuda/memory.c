/* memory.c: device memory, host registrations, handles for other processes. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "fake.h"

typedef struct registration { uint64_t address, size; struct registration *next; } registration;

static fake_memory *memories;
static registration *registrations;
static uint64_t next_id = 1;

fake_memory *fake_find(uint64_t address, uint64_t size) {
  for (fake_memory *m = memories; m; m = m->next)
    if (m->address <= address && address + size <= m->address + m->size) return m;
  return NULL;
}

int fake_registered(uint64_t address, uint64_t size) {
  for (registration *r = registrations; r; r = r->next) {
    if (r->address <= address && address + size <= r->address + r->size) return 1;
    if (r->address < address + size && address < r->address + r->size) return -1;
  }
  return 0;
}

int fake_alive(const fake_memory *memory) {
  struct pollfd exporter = {.fd = memory->process, .events = POLLIN};
  return memory->process < 0 || poll(&exporter, 1, 0) == 0;
}

static void unmap(fake_memory *m) {
  for (fake_memory **place = &memories; *place; place = &(*place)->next)
    if (*place == m) {
      *place = m->next;
      break;
    }
  munmap((void *)(uintptr_t)m->address, m->size);
  munmap((void *)(uintptr_t)m->alias, m->size);
  close(m->fd);
  if (m->process >= 0) close(m->process);
  free(m);
}

static uint64_t map(int fd, uint64_t size, int protection) {
  void *place = mmap(NULL, size, protection, MAP_SHARED, fd, 0);
  if (place == MAP_FAILED) return 0;
  (void)madvise(place, size, MADV_DONTFORK);
  return (uint64_t)(uintptr_t)place;
}

static fake_memory *make(int fd, uint64_t size, int device) {
  fake_memory *m = calloc(1, sizeof *m);
  if (!m) return NULL;
  m->fd = fd, m->size = size, m->device = device, m->process = -1;
  m->address = map(fd, size, PROT_NONE);
  m->alias = map(fd, size, PROT_READ | PROT_WRITE);
  m->next = memories;
  memories = m;
  return m;
}

API int cudaMalloc(void **address, size_t size) {
  ENTER;
  uint64_t whole = (size + 4095) / 4096 * 4096;
  int fd = memfd_create("fake-device", MFD_CLOEXEC);
  if (fd < 0 || !size || ftruncate(fd, (off_t)whole) < 0) return fake_leave(OUT_OF_MEMORY);
  fake_memory *m = make(fd, whole, fake_device);
  m->name.pid = (uint32_t)getpid(), m->name.fd = fd, m->name.id = next_id++;
  *address = (void *)(uintptr_t)m->address;
  fake_living[LIVE_MEMORY]++;
  return fake_leave(OK);
}

API int cudaFree(void *address) {
  ENTER_AS(1);
  if (!address) return fake_leave(error);
  fake_memory *m = fake_find((uintptr_t)address, 1);
  if (!m || m->imported || m->address != (uintptr_t)address) return fake_leave(INVALID_VALUE);
  unmap(m);
  fake_living[LIVE_MEMORY]--;
  return fake_leave(error);
}

/* The streams' mapping of device memory, for the back doors of tests and other fakes; NULL when it is none. */
API void *fake_translate(const void *address, uint64_t size) {
  pthread_mutex_lock(&fake_lock);
  fake_memory *m = fake_find((uintptr_t)address, size);
  void *found = m ? (void *)(uintptr_t)(m->alias + ((uintptr_t)address - m->address)) : NULL;
  fake_leave(0);
  return found;
}

typedef struct { int type, device; void *on_device, *on_host; long reserved[8]; } pointer_attributes;

API int cudaPointerGetAttributes(pointer_attributes *found, const void *address) {
  ENTER;
  fake_memory *m = fake_find((uintptr_t)address, 1);
  int pinned = fake_registered((uintptr_t)address, 1) > 0;
  found->type = m ? 2 : pinned ? 1 : 0;
  found->device = m ? m->device : pinned ? fake_device : -2;
  found->on_device = m || pinned ? (void *)address : NULL;
  found->on_host = pinned ? (void *)address : NULL;
  return fake_leave(OK);
}

API int cuMemGetAddressRange_v2(uint64_t *base, size_t *size, uint64_t address) {
  ENTER;
  fake_memory *m = fake_find(address, 1);
  if (!m) return fake_leave(INVALID_VALUE);
  *base = m->address, *size = m->size;
  return fake_leave(OK);
}

/* ---- registrations -------------------------------------------------------------------------------------- */

API int cudaHostRegister(void *address, size_t size, unsigned flags) {
  ENTER;
  if ((uintptr_t)address % 4096 || !size || !(flags & 1)) return fake_leave(INVALID_VALUE);
  if (fake_registered((uintptr_t)address, size)) return fake_leave(ALREADY_REGISTERED);
  registration *r = malloc(sizeof *r);
  *r = (registration){(uintptr_t)address, size, registrations};
  registrations = r;
  fake_living[LIVE_REGISTRATIONS]++;
  return fake_leave(OK);
}

API int cudaHostUnregister(void *address) {
  ENTER_AS(1);
  for (registration **place = &registrations; *place; place = &(*place)->next) {
    registration *r = *place;
    if (r->address != (uintptr_t)address) continue;
    *place = r->next;
    free(r);
    fake_living[LIVE_REGISTRATIONS]--;
    return fake_leave(error);
  }
  return fake_leave(NOT_REGISTERED);
}

API int cudaHostGetDevicePointer(void **on_device, void *address, unsigned flags) {
  ENTER;
  (void)flags;
  if (fake_registered((uintptr_t)address, 1) <= 0) return fake_leave(INVALID_VALUE);
  *on_device = address;
  return fake_leave(OK);
}

/* ---- handles -------------------------------------------------------------------------------------------- */

typedef struct { char bytes[64]; } ipc_handle;
typedef struct { uint64_t magic, size, id; uint32_t pid; int32_t fd, device; } ipc_content;
#define MAGIC 0x66616b6520697063u

API int cudaIpcGetMemHandle(ipc_handle *handle, void *address) {
  ENTER;
  fake_memory *m = fake_find((uintptr_t)address, 1);
  if (!m || m->imported) return fake_leave(INVALID_VALUE);
  ipc_content content = {MAGIC, m->size, m->name.id, m->name.pid, m->fd, m->device};
  memset(handle, 0, sizeof *handle);
  memcpy(handle->bytes, &content, sizeof content);
  return fake_leave(OK);
}

API int cudaIpcOpenMemHandle(void **address, ipc_handle handle, unsigned flags) {
  ENTER;
  ipc_content content;
  memcpy(&content, handle.bytes, sizeof content);
  if (content.magic != MAGIC || flags != 1) return fake_leave(INVALID_VALUE);
  if (content.pid == (uint32_t)getpid()) return fake_leave(INVALID_CONTEXT);
  if (content.device != fake_device) {
    fake_violation("a handle of device %d was opened on device %d", content.device, fake_device);
    return fake_leave(INVALID_DEVICE);
  }
  for (fake_memory *m = memories; m; m = m->next)
    if (m->imported && m->name.pid == content.pid && m->name.id == content.id) {
      m->opened++;
      *address = (void *)(uintptr_t)m->address;
      return fake_leave(OK);
    }
  char path[64];
  snprintf(path, sizeof path, "/proc/%u/fd/%d", content.pid, content.fd);
  int process = (int)syscall(SYS_pidfd_open, content.pid, 0), fd = open(path, O_RDWR | O_CLOEXEC);
  if (process < 0 || fd < 0) {
    if (process >= 0) close(process);
    if (fd >= 0) close(fd);
    return fake_leave(MAP_FAILED_CUDA);
  }
  fake_memory *m = make(fd, content.size, content.device);
  m->imported = 1, m->opened = 1, m->process = process;
  m->name.pid = content.pid, m->name.fd = content.fd, m->name.id = content.id;
  *address = (void *)(uintptr_t)m->address;
  fake_living[LIVE_IMPORTS]++;
  return fake_leave(OK);
}

API int cudaIpcCloseMemHandle(void *address) {
  ENTER_AS(1);
  fake_memory *m = fake_find((uintptr_t)address, 1);
  if (!m || !m->imported) return fake_leave(INVALID_VALUE);
  if (--m->opened == 0) {
    unmap(m);
    fake_living[LIVE_IMPORTS]--;
  }
  return fake_leave(error);
}
