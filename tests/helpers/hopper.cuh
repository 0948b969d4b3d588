// Prologue for Hopper device code in tests: headers, and the type that the host normally declares.
using real = float;
#include <ptx/mbarrier.cuh>
#include <tile/tma_tile.cuh>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <ptx/named_barrier.cuh>
#include <tile/shared.cuh>
#include <ptx/bulk_copy.cuh>
#include <ptx/tma_store.cuh>
#include <ptx/setmaxnreg.cuh>
#include <ptx/stmatrix.cuh>
#include <ptx/e4m3.cuh>
#include <ptx/wgmma_columns.cuh>

template <class T>
__device__ void fill(void* to, const T* from, int count) {
  for (int i = threadIdx.x; i < count; i += blockDim.x) static_cast<T*>(to)[i] = from[i];
}
