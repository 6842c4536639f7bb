/* Zeroed memory for large tables: huge pages where the kernel grants them, so that a random access costs no page walk. */
#ifndef FX_PAGES_H
#define FX_PAGES_H
#ifndef _GNU_SOURCE
#error "define _GNU_SOURCE before the first include"
#endif
#include <stddef.h>
#include <sys/mman.h>

static inline void *fx_pages_map(size_t size) {
  void *memory = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) return NULL;
  madvise(memory, size, MADV_HUGEPAGE); /* a wish; small pages work too */
  return memory;
}

static inline void fx_pages_unmap(void *memory, size_t size) {
  if (memory) munmap(memory, size);
}
#endif
