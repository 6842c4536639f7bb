// move.cu: gather or scatter the segments of many blocks between device memory and pinned host memory, in one launch.
//
// A warp takes a segment, then the next one that is nobody else's; a few thread blocks keep the link full and leave
// the other multiprocessors to the engine. move.ptx is made from this file by scripts/make_ptx.sh.
#include <stdint.h>

struct Plane {  // fx_plane of flexkv/_core/copy.h
  uint64_t base;
  int64_t block_stride, stride[3];
  uint32_t count[3], segment_bytes;
  uint64_t offset;
};

struct Move {
  const Plane *planes;
  const uint32_t *slots, *blocks;
  uint64_t host_base, host_stride;
  uint32_t n_planes, n_blocks, to_device, segments;  // segments of one block, over all planes
};

template <typename Word>
static __device__ void copy_words(uint64_t target, uint64_t source, uint32_t bytes, uint32_t lane) {
  const Word *from = reinterpret_cast<const Word *>(source);
  Word *to = reinterpret_cast<Word *>(target);
  const uint32_t words = bytes / sizeof(Word);
  uint32_t i = lane;
  for (; i + 96 < words; i += 128) {  // four loads are on their way before the first is stored
    const Word a = from[i], b = from[i + 32], c = from[i + 64], d = from[i + 96];
    to[i] = a, to[i + 32] = b, to[i + 64] = c, to[i + 96] = d;
  }
  for (; i < words; i += 32) to[i] = from[i];
}

static __device__ void copy_segment(uint64_t target, uint64_t source, uint32_t bytes, uint32_t lane) {
  const uint64_t bits = target | source | bytes;
  if (bits % 16 == 0)
    copy_words<uint4>(target, source, bytes, lane);
  else if (bits % 4 == 0)
    copy_words<uint32_t>(target, source, bytes, lane);
  else if (bits % 2 == 0)
    copy_words<uint16_t>(target, source, bytes, lane);
  else
    copy_words<uint8_t>(target, source, bytes, lane);
}

extern "C" __global__ void __launch_bounds__(512) flexkv_move(const Move move) {
  const uint32_t lane = threadIdx.x % 32, warps = gridDim.x * (blockDim.x / 32);
  uint64_t item = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32, begin = 0;
  for (uint32_t p = 0; p < move.n_planes; p++) {
    const Plane plane = move.planes[p];
    const uint32_t inner = plane.count[2], middle = plane.count[1] * inner, segments = plane.count[0] * middle;
    const uint64_t end = begin + static_cast<uint64_t>(segments) * move.n_blocks;
    for (; item < end; item += warps) {
      const uint64_t at = item - begin;
      const uint32_t i = at / segments, s = at % segments;
      const int64_t inside = static_cast<int64_t>(s / middle) * plane.stride[0] +
                             static_cast<int64_t>(s % middle / inner) * plane.stride[1] +
                             static_cast<int64_t>(s % inner) * plane.stride[2];
      const uint64_t device = plane.base + static_cast<int64_t>(move.blocks[i]) * plane.block_stride + inside;
      const uint64_t host = move.host_base + move.slots[i] * move.host_stride + plane.offset +
                            static_cast<uint64_t>(s) * plane.segment_bytes;
      if (move.to_device)
        copy_segment(device, host, plane.segment_bytes, lane);
      else
        copy_segment(host, device, plane.segment_bytes, lane);
    }
    begin = end;
  }
}
