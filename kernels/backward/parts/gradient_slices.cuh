#pragma once
// Building blocks of the `mma_slices_backward` kernels: the warps' tiles of accumulators, a ring
// buffer of operand slices in shared memory, and P and dS of a round in global memory.

#include <backward/parts/tile_products.cuh>
#include <ptx/cp_async.cuh>
#include <ptx/opaque.cuh>
#include <tile/shared.cuh>
#include <tile/warp.cuh>

// Each warp owns Wr x Wc scores of the block's Br x Bc tile. Operand slices are Bd deep, and shared
// memory holds `stages` of them.
template <int threads, int Br, int Bc, int Wr, int Wc, int Bd, int stages>
struct Slices {
  static constexpr int row_warps = Br / Wr, col_warps = Bc / Wc;
  static_assert(threads == warp_size * row_warps * col_warps, "the warps' tiles cover the tile");
  static_assert(Wr % step == 0 && Wc % (2 * step) == 0 && Bd % step == 0, "whole products");
  static_assert(Br % Wr == 0 && Bc % Wc == 0, "the warps' parts are equal");
  static_assert(Bc % Br == 0 && Br % Bd == 0, "a slice of P or dS lies in one of their tiles");
  static_assert(stages >= 2, "one slice is multiplied while the next is copied");

  // A gradient with `cols` columns is split into cdiv(cols, Bc) tiles of equal width. A warp owns
  // Wr x own_width elements of a tile.
  template <int cols>
  static constexpr int own_width = cdiv(cols, cdiv(cols, Bc) * col_warps * step) * step;
  template <int cols>
  static constexpr int tile_width = own_width<cols> * col_warps;

  // A buffer for one slice of any operand.
  struct alignas(128) Stage {
    operand numbers[(Br + Bc) * Bd];

    template <class Slice>
    __device__ __forceinline__ Slice& as() {
      static_assert(sizeof(Slice) <= sizeof(Stage), "a slice fits into its stage");
      return reinterpret_cast<Slice&>(*this);
    }
  };

  // First row and column of the warp's part of a tile.
  struct Own {
    int row, col;

    __device__ __forceinline__ explicit Own(int width) {
      const int warp = opaque(int(threadIdx.x)) / warp_size;
      row = warp % row_warps * Wr;
      col = warp / row_warps * width;
    }
    __device__ __forceinline__ bool has(int) const { return true; }
  };
};

// Ring buffer of the slices that a block multiplies. source.begin() starts the copy of the next
// slice, if one is left.
template <class Source, class Stage, int stages>
struct Ring {
  Stage (&ring)[stages];
  Source source;
  int stage = 0;

  __device__ __forceinline__ void start() {
#pragma unroll 1
    for (int i = 0; i < stages - 1; ++i) begin(i);
  }
  __device__ __forceinline__ void begin(int place) {
    source.begin(ring[place]);
    cp_async_commit_group();
  }
  // Half of the warps start copies before their products, in next(). The `late` half starts them
  // after, in done(), so that on each scheduler some warps copy while others multiply.
  __device__ __forceinline__ bool late() const { return threadIdx.x / warp_size / 4 % 2 == 1; }
  __device__ __forceinline__ Stage& next() {
    cp_async_wait_group<stages - 2>();
    __syncthreads();  // the slice has arrived, and no thread still reads the previous slice
    if (!late()) begin(stage == 0 ? stages - 1 : stage - 1);
    return ring[stage];
  }
  __device__ __forceinline__ void done() {
    if (late()) begin(stage == 0 ? stages - 1 : stage - 1);
    stage = stage == stages - 1 ? 0 : stage + 1;
  }
};

// A round covers heads from `first_head` on, counted over all batch elements, and keys from
// `first_key` on. Its P and dS have shape [heads, M, stride]. Column 0 is key `first_key`, and
// stride is a multiple of 8, so that copies move 16 bytes at a time.
struct Round {
  int first_head, first_key, stride, M;

  // Returns P or dS of a head in the form that copy_tile() reads.
  __device__ __forceinline__ Head of(const operand* matrix, int head) const {
    const long long rows = M;
    return Head(Tensor<const operand>{matrix, 0, rows * stride, stride}, 0, head, M);
  }
};
