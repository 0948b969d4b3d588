// Attention with shared key heads: one block per query head, one thread per row.

constexpr int d = 8;
constexpr float infinity = __builtin_bit_cast(float, 0x7f800000);

// q, out [batch, heads, M, d]. k, v [batch, kv_heads, N, d], read directly from global memory.
extern "C" __global__ void grouped_heads(const float* q, const float* k, const float* v, float* out,
                                         int heads, int kv_heads, int M, int N, float scale) {
  const int row = threadIdx.x;
  if (row >= M) return;

  // hole
  const int batch = blockIdx.x / heads, head = blockIdx.x % heads;
  const int group = heads / kv_heads;  // query heads that share a key head
  const int kv_head = batch * kv_heads + head / group;
  const float* K = k + kv_head * N * d;
  const float* V = v + kv_head * N * d;
  const float* Q = q + (blockIdx.x * M + row) * d;
  float* O = out + (blockIdx.x * M + row) * d;
  // end

  float sums[d] = {}, m = -infinity, l = 0;
  for (int key = 0; key < N; ++key) {
    float score = 0;
    for (int c = 0; c < d; ++c) score += scale * Q[c] * K[key * d + c];
    const float largest = fmaxf(m, score), factor = expf(m - largest), p = expf(score - largest);
    m = largest;
    l = l * factor + p;
    for (int c = 0; c < d; ++c) sums[c] = sums[c] * factor + p * V[key * d + c];
  }
  for (int c = 0; c < d; ++c) O[c] = sums[c] / l;
}
