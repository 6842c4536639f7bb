/* memory.c: device memory is a memfd, mapped twice. The address that the host gets is reserved and closed to every
 * access; the engines use another mapping of the same bytes. Neither is passed on by fork. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "sim.h"

static int fail(sim_memory *memory) {
  int error = errno;
  sim_memory_close(memory);
  return -error;
}

static void *map(int fd, uint64_t size, int protection) {
  void *place = mmap(NULL, size, protection, MAP_SHARED, fd, 0);
  if (place == MAP_FAILED) return NULL;
  (void)madvise(place, size, MADV_DONTFORK);
  return place;
}

int sim_memory_open(int fd, uint64_t size, sim_memory *memory) {
  *memory = (sim_memory){.size = size, .fd = -1};
  if (fd >= 0) {
    struct stat status;
    if (fstat(fd, &status) < 0) return -errno;
    if ((uint64_t)status.st_size < size) return -EINVAL;
    memory->fd = fcntl(fd, F_DUPFD_CLOEXEC, 0);
    if (memory->fd < 0) return fail(memory);
  } else {
    memory->fd = memfd_create("simulated-device", MFD_CLOEXEC);
    if (memory->fd < 0 || ftruncate(memory->fd, (off_t)size) < 0) return fail(memory);
  }
  memory->address = (uint64_t)(uintptr_t)map(memory->fd, size, PROT_NONE);
  if (!memory->address) return fail(memory);
  memory->alias = (uint64_t)(uintptr_t)map(memory->fd, size, PROT_READ | PROT_WRITE);
  return memory->alias ? 0 : fail(memory);
}

void sim_memory_close(sim_memory *memory) {
  if (memory->address) munmap((void *)(uintptr_t)memory->address, memory->size);
  if (memory->alias) munmap((void *)(uintptr_t)memory->alias, memory->size);
  if (memory->fd >= 0) close(memory->fd);
  *memory = (sim_memory){.fd = -1};
}
