// Code that __half and __nv_bfloat16 share. The header of each type includes this file once and
// defines NUMBER, RAW and PAIR (types), BITS (float to bits) and VALUE (bits to float).

struct NUMBER {
  unsigned short bits;

  NUMBER() = default;
  // A copy constructor makes the compiler instrument an argument that is passed by value from
  // memory. Inlining makes reports name the caller's location.
  SIMULATOR_INLINED NUMBER(const NUMBER& other) : bits(other.bits) {}
  NUMBER& operator=(const NUMBER& other) = default;
  NUMBER(RAW raw) : bits(raw.x) {}
  NUMBER(float value) : bits(BITS(value)) {}
  NUMBER(double value) : bits(BITS(simulator::round_to_odd(value))) {}
  NUMBER(int value) : NUMBER(static_cast<double>(value)) {}
  NUMBER(unsigned value) : NUMBER(static_cast<double>(value)) {}
  NUMBER(short value) : NUMBER(static_cast<float>(value)) {}
  NUMBER(unsigned short value) : NUMBER(static_cast<float>(value)) {}
  NUMBER(long long value) : NUMBER(static_cast<double>(value)) {}
  NUMBER(unsigned long long value) : NUMBER(static_cast<double>(value)) {}

  SIMULATOR_INLINED operator float() const { return VALUE(bits); }
  SIMULATOR_INLINED operator RAW() const { return {bits}; }
};

struct alignas(4) PAIR {
  NUMBER x, y;

  PAIR() = default;
  PAIR(NUMBER low, NUMBER high) : x(low), y(high) {}
};

inline NUMBER __hadd(NUMBER a, NUMBER b) {
  return NUMBER(float(a) + float(b));
}
inline NUMBER __hsub(NUMBER a, NUMBER b) {
  return NUMBER(float(a) - float(b));
}
inline NUMBER __hmul(NUMBER a, NUMBER b) {
  return NUMBER(float(a) * float(b));
}
inline NUMBER __hdiv(NUMBER a, NUMBER b) {
  return NUMBER(float(a) / float(b));
}
inline NUMBER __hneg(NUMBER a) {
  return NUMBER(RAW{static_cast<unsigned short>(a.bits ^ 0x8000)});
}
inline NUMBER __habs(NUMBER a) {
  return NUMBER(RAW{static_cast<unsigned short>(a.bits & 0x7fff)});
}
// The product is exact in double. The sum is rounded to odd, so that rounding it again is correct.
inline NUMBER __hfma(NUMBER a, NUMBER b, NUMBER c) {
  double product = double(float(a)) * double(float(b));
  return NUMBER(simulator::add_to_odd(product, double(float(c))));
}

inline NUMBER operator+(const NUMBER& a, const NUMBER& b) {
  return __hadd(a, b);
}
inline NUMBER operator-(const NUMBER& a, const NUMBER& b) {
  return __hsub(a, b);
}
inline NUMBER operator*(const NUMBER& a, const NUMBER& b) {
  return __hmul(a, b);
}
inline NUMBER operator/(const NUMBER& a, const NUMBER& b) {
  return __hdiv(a, b);
}
inline NUMBER operator-(const NUMBER& a) {
  return __hneg(a);
}
inline NUMBER& operator+=(NUMBER& a, const NUMBER& b) {
  return a = a + b;
}
inline NUMBER& operator-=(NUMBER& a, const NUMBER& b) {
  return a = a - b;
}
inline NUMBER& operator*=(NUMBER& a, const NUMBER& b) {
  return a = a * b;
}
inline NUMBER& operator/=(NUMBER& a, const NUMBER& b) {
  return a = a / b;
}
inline bool operator==(const NUMBER& a, const NUMBER& b) {
  return float(a) == float(b);
}
inline bool operator!=(const NUMBER& a, const NUMBER& b) {
  return !(a == b);
}
inline bool operator<(const NUMBER& a, const NUMBER& b) {
  return float(a) < float(b);
}
inline bool operator>(const NUMBER& a, const NUMBER& b) {
  return b < a;
}
inline bool operator<=(const NUMBER& a, const NUMBER& b) {
  return float(a) <= float(b);
}
inline bool operator>=(const NUMBER& a, const NUMBER& b) {
  return b <= a;
}

inline bool __heq(NUMBER a, NUMBER b) {
  return a == b;
}
inline bool __hlt(NUMBER a, NUMBER b) {
  return a < b;
}
inline bool __hgt(NUMBER a, NUMBER b) {
  return a > b;
}
inline bool __hisnan(NUMBER a) {
  return isnan(float(a));
}
inline NUMBER __hmax(NUMBER a, NUMBER b) {
  return NUMBER(fmaxf(float(a), float(b)));
}
inline NUMBER __hmin(NUMBER a, NUMBER b) {
  return NUMBER(fminf(float(a), float(b)));
}
inline NUMBER hexp(NUMBER a) {
  return NUMBER(expf(float(a)));
}
inline NUMBER hexp2(NUMBER a) {
  return NUMBER(exp2f(float(a)));
}
inline NUMBER hlog(NUMBER a) {
  return NUMBER(logf(float(a)));
}
inline NUMBER hsqrt(NUMBER a) {
  return NUMBER(sqrtf(float(a)));
}

inline float __low2float(PAIR pair) {
  return float(pair.x);
}
inline float __high2float(PAIR pair) {
  return float(pair.y);
}
inline PAIR __hadd2(PAIR a, PAIR b) {
  return PAIR(a.x + b.x, a.y + b.y);
}
inline PAIR __hsub2(PAIR a, PAIR b) {
  return PAIR(a.x - b.x, a.y - b.y);
}
inline PAIR __hmul2(PAIR a, PAIR b) {
  return PAIR(a.x * b.x, a.y * b.y);
}
inline PAIR __hfma2(PAIR a, PAIR b, PAIR c) {
  return PAIR(__hfma(a.x, b.x, c.x), __hfma(a.y, b.y, c.y));
}
inline PAIR operator+(const PAIR& a, const PAIR& b) {
  return __hadd2(a, b);
}
inline PAIR operator-(const PAIR& a, const PAIR& b) {
  return __hsub2(a, b);
}
inline PAIR operator*(const PAIR& a, const PAIR& b) {
  return __hmul2(a, b);
}

#undef NUMBER
#undef RAW
#undef PAIR
#undef BITS
#undef VALUE
