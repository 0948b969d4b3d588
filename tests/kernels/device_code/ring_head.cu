constexpr int bytes = 64 * 128 + 32 * 128;
struct Shared {
  TmaTile<__half, 64, 64> A[2];
  TmaTile<__half, 32, 64> B[2];
  Barrier full[2];
  Barrier empty[2];
};
