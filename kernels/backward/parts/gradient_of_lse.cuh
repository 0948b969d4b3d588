#pragma once
// Returns the gradient of lse, or 0 if the call passes none. Since d lse / dS = P, this gradient is
// subtracted from D: dS = P * (dP - (D - dlse)).

#include <tile/math.cuh>

struct Mods;

template <bool used = has_dlse, class Arrays>
__device__ __forceinline__ real gradient_of_lse([[maybe_unused]] const Arrays& mods,
                                                [[maybe_unused]] int batch,
                                                [[maybe_unused]] int head,
                                                [[maybe_unused]] int row) {
  if constexpr (used)
    return mods.dlse_.read(batch, head, row).value;
  else
    return 0;
}
