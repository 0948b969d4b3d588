#pragma once
// Epilogue of dK and dV on tensor cores: stores a warp's part, or recomputes it.

#include <backward/parts/cold_path.cuh>
#include <backward/parts/repair_keys.cuh>
#include <backward/parts/store_gradient.cuh>
#include <backward/parts/warp_partition.cuh>
#include <timeline.cuh>

// Stores the warp's part of dK or dV, or recomputes it if it is not finite.
template <bool of_V, int d, int dv, class T, class Stats, class Own>
__device__ __forceinline__ void store_or_repair(const typename Own::Sums& sums,
                                                Tensor<result> gradient, const Own& own,
                                                const Repair<d, dv, T, Stats>& repair, int group,
                                                int first_key, int lane) {
  const timeline::Phase phase(timeline::epilogue);
  const int first = first_key + own.row;
  if (all_finite(sums))
    store_gradient<of_V ? dv : d>(sums, of_V ? repair.extent.kept_factor() : repair.scorer.scale,
                                  gradient, repair.batch, repair.kv_head, first, repair.extent.N,
                                  lane, own.col);
  else
    call_cold_path([=] {
      repair_keys<of_V, Own::cols>(repair, gradient, group, first, first + Own::rows, own.col);
    });
}
