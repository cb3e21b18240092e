#include "vectors512.h"
#define QKV_TILES  // products of pairs on tiles
#define QKV_BESIDE qkv::KERNELS_AVX512
#include "../kernels/target_pairs-inl.h"

namespace qkv {

const Kernels KERNELS_AMX{"amx", run_pairs_forward, run_pairs_backward, &LINEAR_AVX512};

// Whether a product on the tiles of this processor is what it should be.
bool amx_works() {
  uint16_t a[16][32];
  uint32_t b[16][16];
  float c[16][16];
  for (int r = 0; r < 16; ++r) {
    for (int k = 0; k < 32; ++k) a[r][k] = static_cast<uint16_t>(r == k / 2 ? 0x3f80 + (k % 2) * 0x80 : 0);  // 1 and 2
    for (int n = 0; n < 16; ++n) b[r][n] = 0x40003f80u;                                                      // 1 and 2
  }
  const Tiles tiles;
  multiply_tiles({Start::zero, nullptr, a[0], 32, b[0], 16, c[0], 16}, 16, 16, 32);
  bool good = true;
  for (int r = 0; r < 16; ++r) {
    for (int n = 0; n < 16; ++n) good = good && c[r][n] == 5;
  }
  return good;
}

}  // namespace qkv
