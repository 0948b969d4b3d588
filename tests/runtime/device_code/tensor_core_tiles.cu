Accumulator d{};
auto a = load_a(A + s0, 24);
auto b = ${load}(A + s0 + 16 * 24, 24);
multiply_add(d, a, b);
multiply_add(d, a, b);
store(B + s1, 20, d);
