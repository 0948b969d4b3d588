#pragma once
// A bias that batch elements share, in shared memory for all keys. It is copied once for all tiles
// of Q that differ only in the batch element. The host sets kept_tiles, the number of key tiles.

// Rows of the bias for one warp; padded against bank conflicts, as in StagedBias.
template <int bytes, int n>
struct KeptRows {
  alignas(16) char rows[16][kept_tiles * n * 8 * bytes + 16];
};

// The tile of a warp's rows that begins at `first_key`; replaces StagedBias.
template <int bytes, int n>
struct KeptTile {
  static constexpr bool is_used = true;
  using Staged = StagedBias<bytes, n>;
  using Part = typename Staged::Part;
  KeptRows<bytes, n>& kept;
  int first_key;

  // Starts copying the tiles of all keys, unless the rows are kept from the tile of Q before.
  template <class Rows>
  __device__ __forceinline__ void load(const Rows& own, int first_key, bool is_kept = false) const {
    if (first_key > 0 || is_kept) return;
    const int first_row = own.first - threadIdx.x % warp_size / 4;
    wait_for_bias();  // all lanes have read the rows before
#pragma unroll 1
    for (int key = 0; key < own.extent.N; key += n * 8)
      copy_bias<bytes, 16, n * 8, false>(own.extent, first_row, key, [&](int row, int chunk) {
        return &kept.rows[row][key * bytes + chunk * 16];
      });
  }
  __device__ __forceinline__ void complete() const { wait_for_bias(); }
  __device__ __forceinline__ Part part(int half, int j) const {
    return Staged::part_of(kept.rows, first_key * bytes, half, j);
  }
  __device__ __forceinline__ HeldIndex index(Index key, const Part& part, int j) const {
    return {key, part.r[j / 2 % 4], j % 2 != 0};
  }
};

template <int bytes, int n, int warps>
struct OfWarps<StagedBias<bytes, n>, warps, true> {
  KeptRows<bytes, n> kept[warps];

  __device__ __forceinline__ KeptTile<bytes, n> own(int first_key = 0) {
    return {kept[threadIdx.x / warp_size - 4], first_key};
  }
};
