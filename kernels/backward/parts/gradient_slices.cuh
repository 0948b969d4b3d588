#pragma once
// Tiles of the launches of `mma_slices_backward`: accumulators in registers, their operands in a
// ring of slices, and P and dS of a round of heads in memory.

#include <backward/parts/tile_products.cuh>
#include <ptx/cp_async.cuh>
#include <ptx/opaque.cuh>
#include <tile/shared.cuh>
#include <tile/warp.cuh>

// Each warp of a block owns Wr x Wc of a tile of Br x Bc scores. Slices have a depth of Bd, and
// shared memory holds `stages` of them.
template <int threads, int Br, int Bc, int Wr, int Wc, int Bd, int stages>
struct Slices {
  static constexpr int row_warps = Br / Wr, col_warps = Bc / Wc;
  static_assert(threads == warp_size * row_warps * col_warps, "the warps' tiles cover the tile");
  static_assert(Wr % step == 0 && Wc % (2 * step) == 0 && Bd % step == 0, "whole products");
  static_assert(Br % Wr == 0 && Bc % Wc == 0, "warps have equal parts");
  static_assert(Bc % Br == 0 && Br % Bd == 0, "what is read of P and dS lies in one tile of them");
  static_assert(stages >= 2, "one slice is multiplied while another one comes");

  // A warp owns Wr x `own_width` of a tile of gradients with `cols` columns in all. All tiles are
  // equally wide, and as few as with Bc columns each.
  template <int cols>
  static constexpr int own_width = cdiv(cols, cdiv(cols, Bc) * col_warps * step) * step;
  template <int cols>
  static constexpr int tile_width = own_width<cols> * col_warps;

  // The buffer of a slice, whatever its tiles are.
  struct alignas(128) Stage {
    operand numbers[(Br + Bc) * Bd];

    template <class Slice>
    __device__ __forceinline__ Slice& as() {
      static_assert(sizeof(Slice) <= sizeof(Stage), "a slice fits into its stage");
      return reinterpret_cast<Slice&>(*this);
    }
  };

  // The first row and column of a warp's part of a tile.
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

// The ring of slices that a block multiplies. `source.begin` begins to copy the next one, if there
// is one.
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
  // Some warps begin copies before their products, and `late` ones after them, in `done`: warps
  // that share a scheduler then copy while others multiply.
  __device__ __forceinline__ bool late() const { return threadIdx.x / warp_size / 4 % 2 == 1; }
  __device__ __forceinline__ Stage& next() {
    cp_async_wait_group<stages - 2>();
    __syncthreads();  // the slice has arrived, and the one before it is no longer read
    if (!late()) begin(stage == 0 ? stages - 1 : stage - 1);
    return ring[stage];
  }
  __device__ __forceinline__ void done() {
    if (late()) begin(stage == 0 ? stages - 1 : stage - 1);
    stage = stage == stages - 1 ? 0 : stage + 1;
  }
};

// A round has heads from `first_head` on, counted over all batches, and keys from `first_key` on.
// Its P and dS are [heads, M, stride]; column 0 is key `first_key`, and stride is a multiple of 8,
// so that copies take 16 bytes at a time.
struct Round {
  int first_head, first_key, stride, M;

  // Returns a head's P or dS as rows that copies read.
  __device__ __forceinline__ Head of(const operand* matrix, int head) const {
    const long long rows = M;
    return Head(Tensor<const operand>{matrix, 0, rows * stride, stride}, 0, head, M);
  }
};
