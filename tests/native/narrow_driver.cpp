// The conversions between float and 16 bits of one instruction set, on what comes in:
//
//   narrow_driver TYPE WAY < numbers > numbers     TYPE half or bfloat; WAY widen or narrow, widen_one or narrow_one
//
// Compiled with the flags of a target, and with its QKV_BYTES.
#include <cstdio>
#include <string>
#include <vector>

#include "kernels/narrow-inl.h"

namespace {

template <class T>
std::vector<T> read() {
  std::vector<T> numbers;
  T some[4096];
  while (const size_t read = std::fread(some, sizeof(T), 4096, stdin)) numbers.insert(numbers.end(), some, some + read);
  return numbers;
}

template <class To, class From, class Convert>
int convert(size_t step, Convert work) {
  std::vector<From> from = read<From>();
  const size_t count = from.size();
  from.resize(count + LANES<float>);
  std::vector<To> to(count + LANES<float>);
  for (size_t n = 0; n < count; n += step) work(from.data() + n, to.data() + n);
  return std::fwrite(to.data(), sizeof(To), count, stdout) != count;
}

template <class E>
int run(const std::string& way) {
  const size_t lanes = LANES<float>;
  if (way == "widen") return convert<float, E>(lanes, [](const E* x, float* y) { store(y, load_as<float>(x)); });
  if (way == "narrow") return convert<E, float>(lanes, [](const float* x, E* y) { store_as<float>(y, load(x)); });
  if (way == "widen_one") return convert<float, E>(1, [](const E* x, float* y) { *y = number_as<float>(*x); });
  if (way == "narrow_one") return convert<E, float>(1, [](const float* x, E* y) { *y = number_from<E>(*x); });
  return 2;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 3) return 2;
  return argv[1] == std::string("half") ? run<Half>(argv[2]) : run<Bfloat>(argv[2]);
}
