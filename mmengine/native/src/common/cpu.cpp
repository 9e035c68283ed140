// Requests permission to use AMX from the operating system.

#include <cstdint>
#if defined(__AMX_TILE__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

// Returns 1 if all threads may use the tile registers from now on, else 0. Linux grants them to a process on request
// (Documentation/arch/x86/xstate.rst: ARCH_REQ_XCOMP_PERM, component 18, the tile data).
extern "C" int32_t mm_allow_amx() {
#if defined(__AMX_TILE__)
  const long request_permission = 0x1023, tile_data = 18;
  return syscall(SYS_arch_prctl, request_permission, tile_data) == 0;
#else
  return 0;
#endif
}
