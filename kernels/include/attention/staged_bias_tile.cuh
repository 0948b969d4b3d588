#pragma once
// A warp's bias tile in shared memory. Reading its elements directly from global memory would touch
// eight rows at a time. `bytes` is the size of an element.

#include <attention/bias_tile.cuh>
#include <ptx/cp_async.cuh>
#include <ptx/mma.cuh>
#include <tile/warp.cuh>

__device__ __forceinline__ void wait_for_bias() {
  cp_async_wait_group<0>();
  __syncwarp();
}

// Starts copying `rows` rows of `keys` keys. Elements past the end become 0. If `waits`, earlier
// copies have ended before.
template <int bytes, int rows, int keys, bool waits = true, class Place, class At>
__device__ __forceinline__ void copy_bias(const Place& of, int first_row, int first_key, At at) {
  constexpr int in_chunk = 16 / bytes, chunks = keys / in_chunk, at_once = warp_size / chunks;
  const int lane = threadIdx.x % warp_size, own = lane / chunks, key = lane % chunks * in_chunk;
  const auto row_at = [&](int row) { return held_row(of.mods, of.batch, of.head, Index(row)); };
  const auto row_stride = row_at(1) - row_at(0);
  const auto* from = row_at(first_row + own) + (first_key + key);
  const int left = min(in_chunk, max(0, of.N - first_key - key)) * bytes;
  const auto bytes_of = [&](int row) { return first_row + row < of.M ? left : 0; };
  const auto copy = [&](bool all_exist) {
#pragma unroll
    for (int i = 0; i < rows; i += at_once, from += at_once * row_stride)
      if (own < at_once && (rows % at_once == 0 || i + own < rows))
        cp_async(at(i + own, lane % chunks), from, all_exist ? 16 : bytes_of(i + own));
  };
  if constexpr (waits) wait_for_bias();  // copies of a skipped tile may be in flight
  if (first_row + rows <= of.M && first_key + keys <= of.N)
    copy(true);
  else
    copy(false);
  cp_async_commit_group();
}

// A bias tile for scores of 16 rows and 8 n keys.
template <int bytes, int n>
struct StagedBias {
  static constexpr bool is_used = true;
  alignas(16) char rows[16][n * 8 * bytes + 16];  // padded against bank conflicts

  template <class Rows>
  __device__ __forceinline__ void load(const Rows& own, int first_key, bool = false) {
    const int first_row = own.first - threadIdx.x % warp_size / 4;
    copy_bias<bytes, 16, 8 * n>(own.extent, first_row, first_key,
                                [&](int row, int chunk) { return &rows[row][chunk * 16]; });
  }
  __device__ __forceinline__ void complete() const { wait_for_bias(); }
  // A lane's elements of its row `half` for its keys j to j + 7 (mma.cuh).
  struct Part {
    unsigned r[4];
  };
  __device__ __forceinline__ Part part(int half, int j) const { return part_of(rows, 0, half, j); }
  // Reads from rows of any width; the tile begins at byte `at`.
  template <int width>
  __device__ static __forceinline__ Part part_of(const char (&rows)[16][width], int at, int half,
                                                 int j) {
    const int lane = threadIdx.x % warp_size, first = j / 2 * 8 * bytes;
    Part part;
    if constexpr (bytes == 2) {
      const int from = min(first + lane / 8 * 16, (n - 1) * 16);
      ldmatrix(part.r, SharedAddress(&rows[half * 8 + lane % 8][at + from]));
    } else {
      const char* own = &rows[half * 8 + lane / 4][at + first + lane % 4 * 2];
#pragma unroll
      for (int i = 0; i < 4; ++i) part.r[i] = *reinterpret_cast<const unsigned short*>(own + i * 8);
    }
    return part;
  }
  // Returns the index of key j together with its bias element.
  __device__ __forceinline__ HeldIndex index(Index key, const Part& part, int j) const {
    return {key, part.r[j / 2 % 4], j % 2 != 0};
  }
};

// A bias tile for transposed scores of 16 keys and 8 n rows.
template <int bytes, int n>
struct StagedBiasColumns {
  static constexpr bool is_used = true;
  static_assert(n % 2 == 0, "matrices are loaded in fours");
  alignas(16) char rows[8 * n][16 * bytes];

  // Returns a 16-byte chunk, swizzled so that eight rows fall into different banks.
  __device__ __forceinline__ char* chunk(int row, int i) {
    return &rows[row][bytes == 1 ? 0 : (i ^ row / 4 % 2) * 16];
  }
  template <class Pair>
  __device__ __forceinline__ void load(const Pair& pair, int first_row, int first_key) {
    if (first_row < 0) return;  // past the last tile
    copy_bias<bytes, 8 * n, 16>(pair.extent, first_row, pair.first_key + first_key,
                                [&](int row, int i) { return chunk(row, i); });
  }
  __device__ __forceinline__ void complete() const { wait_for_bias(); }

  // A lane's elements of rows 8 j to 8 j + 15 for keys k and k + 8.
  struct Part {
    unsigned r[4];
  };
  __device__ __forceinline__ Part part(int j) {
    Part part;
    if constexpr (bytes == 2) {
      const int lane = threadIdx.x % warp_size;
      ldmatrix_trans(part.r, SharedAddress(chunk(j * 8 + lane / 16 * 8 + lane % 8, lane / 8 % 2)));
    } else {
      const int lane = threadIdx.x % warp_size;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int row = j * 8 + i / 2 * 8 + lane % 4 * 2, key = i % 2 * 8 + lane / 4;
        part.r[i] = (unsigned char)rows[row][key] | (unsigned char)rows[row + 1][key] << 8;
      }
    }
    return part;
  }
  // Returns the index of key k + 8 i, with its element in row 8 j + 2 * (lane % 4) or the next.
  __device__ __forceinline__ HeldIndex index(Index key, const Part& part, int i, int j,
                                             bool next) const {
    return {key, part.r[j % 2 * 2 + i], next};
  }
};

#include <attention/warp_bias.cuh>
