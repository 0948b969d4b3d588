// Attention with a sink: one block per head, one thread per row.

constexpr int d = 8;
constexpr float infinity = __builtin_bit_cast(float, 0x7f800000);

// q, out [heads, M, d]. k, v [heads, N, d]. sinks [heads]. lse [heads, M].
extern "C" __global__ void sink(const float* q, const float* k, const float* v, const float* sinks,
                                float* out, float* lse, int M, int N, float scale) {
  const int head = blockIdx.x, row = threadIdx.x;
  if (row >= M) return;
  const float* Q = q + (head * M + row) * d;
  const float* K = k + head * N * d;
  const float* V = v + head * N * d;

  float O[d] = {}, m = -infinity, l = 0;
  for (int key = 0; key < N; ++key) {
    float dot = 0;
    for (int c = 0; c < d; ++c) dot += Q[c] * K[key * d + c];
    const float score = scale * dot, largest = fmaxf(m, score), factor = expf(m - largest);
    const float p = expf(score - largest);
    m = largest;
    l = l * factor + p;
    for (int c = 0; c < d; ++c) O[c] = O[c] * factor + p * V[key * d + c];
  }
  // hole
  const float extra = sinks[head], raised = fmaxf(m, extra);
  const float shrink = expf(m - raised);
  m = raised;
  l = l * shrink + expf(extra - m);
  for (int c = 0; c < d; ++c) O[c] *= shrink;
  // end
  for (int c = 0; c < d; ++c) out[(head * M + row) * d + c] = O[c] / l;
  lse[head * M + row] = m + logf(l);
}
