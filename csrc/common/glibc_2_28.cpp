// Functions that newer systems' headers make a library need, built on glibc 2.28 and gcc 8's
// libstdc++.
//
// A wheel is to load wherever torch's own wheels do, which need glibc 2.28. Compiled on a newer
// system, a call of `pow` is bound to pow@GLIBC_2.29, and one of `stat` to a function that 2.28
// lacks. Each name below is defined here, hidden, so that the library's own calls end here. The
// objects that call them stay as they are, and so do their bits. With LMDECODE_PORTABLE the file is
// part of each library. Each definition has a section of its own: the linker drops those that
// nothing calls.
//
// Versioned symbols resolve to the system's, even if the library has an inline copy:
// csrc/exports.map hides the copy, or the loader would take it.

#include <pthread.h>
#include <sys/stat.h>
#include <time.h>

#include <ios>

#if __GLIBC_PREREQ(2, 29)  // older ones need nothing of this

#if defined(__x86_64__)
#define LMD_FIRST_GLIBC "GLIBC_2.2.5"
#define LMD_JUMP_TO(function) "jmp " function "@PLT"
constexpr int kStatVersion = 1;  // _STAT_VER of older headers
#elif defined(__aarch64__)
#define LMD_FIRST_GLIBC "GLIBC_2.17"
#define LMD_JUMP_TO(function) "b " function
constexpr int kStatVersion = 0;
#else
#error "LMDECODE_PORTABLE is for x86-64 and aarch64"
#endif

#define LMD_HIDDEN __attribute__((visibility("hidden")))

// Calls of `name` go to another function of the same arguments, as older releases have it.
#define LMD_INSTEAD(name, older, version)                                                    \
  __asm__(".symver instead_of_" #name ", " #older "@" version "\n .pushsection .text." #name \
          ",\"ax\",%progbits"                                                                \
          "\n .globl " #name "\n .hidden " #name "\n .type " #name ", %function\n" #name     \
          ":\n " LMD_JUMP_TO("instead_of_" #name) "\n .size " #name ", . - " #name           \
                                                  "\n .popsection")
// A function that newer releases have twice: here it is the one of the older version.
#define LMD_OLDER(name, version) LMD_INSTEAD(name, name, version)

// 2.29: computed by the same code, but for errno.
LMD_OLDER(exp, LMD_FIRST_GLIBC);
LMD_OLDER(exp2, LMD_FIRST_GLIBC);
LMD_OLDER(log, LMD_FIRST_GLIBC);
LMD_OLDER(log2, LMD_FIRST_GLIBC);
LMD_OLDER(pow, LMD_FIRST_GLIBC);
// 2.38: likewise.
LMD_OLDER(fmod, LMD_FIRST_GLIBC);

// 2.34: libpthread and libdl moved into libc.
LMD_OLDER(dlclose, LMD_FIRST_GLIBC);
LMD_OLDER(dlerror, LMD_FIRST_GLIBC);
LMD_OLDER(dlopen, LMD_FIRST_GLIBC);
LMD_OLDER(dlsym, LMD_FIRST_GLIBC);
LMD_OLDER(pthread_create, LMD_FIRST_GLIBC);
LMD_OLDER(pthread_join, LMD_FIRST_GLIBC);
LMD_OLDER(pthread_mutex_trylock, LMD_FIRST_GLIBC);
LMD_OLDER(pthread_mutexattr_destroy, LMD_FIRST_GLIBC);
LMD_OLDER(pthread_mutexattr_init, LMD_FIRST_GLIBC);
LMD_OLDER(pthread_mutexattr_settype, LMD_FIRST_GLIBC);
LMD_OLDER(pthread_once, LMD_FIRST_GLIBC);

// gcc 12: std::condition_variable::wait
LMD_OLDER(_ZNSt18condition_variable4waitERSt11unique_lockISt5mutexE, "GLIBCXX_3.4.11");

// gcc 11: str() of streams, of a stream that goes and of one that stays. Both copy the text here.
#define LMD_STR(stream)                                                                    \
  LMD_INSTEAD(_ZNOSt7__cxx11##stream##IcSt11char_traitsIcESaIcEE3strEv,                    \
              _ZNKSt7__cxx11##stream##IcSt11char_traitsIcESaIcEE3strEv, "GLIBCXX_3.4.21"); \
  LMD_INSTEAD(_ZNKRSt7__cxx11##stream##IcSt11char_traitsIcESaIcEE3strEv,                   \
              _ZNKSt7__cxx11##stream##IcSt11char_traitsIcESaIcEE3strEv, "GLIBCXX_3.4.21")
LMD_STR(15basic_stringbuf);
LMD_STR(18basic_stringstream);
LMD_STR(19basic_ostringstream);

extern "C" {

// gcc 9: streams made of nothing. Older ones are made of their mode.
#define LMD_MADE_OF_NOTHING(stream, mode)                                                      \
  __asm__(".symver make_" #stream ", _ZNSt7__cxx11" #stream                                    \
          "IcSt11char_traitsIcESaIcEEC1ESt13_Ios_Openmode@GLIBCXX_3.4.21");                    \
  void make_##stream(void* made, std::ios_base::openmode);                                     \
  LMD_HIDDEN void make_default_##stream(void* made) __asm__("_ZNSt7__cxx11" #stream            \
                                                            "IcSt11char_traitsIcESaIcEEC1Ev"); \
  void make_default_##stream(void* made) { make_##stream(made, mode); }
LMD_MADE_OF_NOTHING(18basic_stringstream, std::ios_base::in | std::ios_base::out)
LMD_MADE_OF_NOTHING(19basic_ostringstream, std::ios_base::out)

// 2.33: these were inline, around those that begin with __ and take a version.
int __fxstat(int version, int descriptor, struct stat* status);
int __fxstat64(int version, int descriptor, struct stat64* status);
int __lxstat64(int version, const char* path, struct stat64* status);
int __xstat(int version, const char* path, struct stat* status);
int __xstat64(int version, const char* path, struct stat64* status);

LMD_HIDDEN int fstat(int descriptor, struct stat* status) noexcept {
  return __fxstat(kStatVersion, descriptor, status);
}
LMD_HIDDEN int fstat64(int descriptor, struct stat64* status) noexcept {
  return __fxstat64(kStatVersion, descriptor, status);
}
LMD_HIDDEN int lstat64(const char* path, struct stat64* status) noexcept {
  return __lxstat64(kStatVersion, path, status);
}
LMD_HIDDEN int stat(const char* path, struct stat* status) noexcept {
  return __xstat(kStatVersion, path, status);
}
LMD_HIDDEN int stat64(const char* path, struct stat64* status) noexcept {
  return __xstat64(kStatVersion, path, status);
}

// 2.32: whether std::shared_ptr may count without atomic operations. It may not.
LMD_HIDDEN char __libc_single_threaded = 0;

// 2.30: a wait on a clock. Older releases wait on the time of day; the caller checks its own clock
// afterwards.
LMD_HIDDEN int pthread_cond_clockwait(pthread_cond_t* condition, pthread_mutex_t* mutex,
                                      clockid_t clock, const timespec* end) {
  constexpr long kSecond = 1'000'000'000;
  timespec now;
  timespec until;
  clock_gettime(clock, &now);
  clock_gettime(CLOCK_REALTIME, &until);
  until.tv_sec += end->tv_sec - now.tv_sec;
  until.tv_nsec += end->tv_nsec - now.tv_nsec;
  if (until.tv_nsec < 0) {
    until.tv_nsec += kSecond;
    --until.tv_sec;
  } else if (until.tv_nsec >= kSecond) {
    until.tv_nsec -= kSecond;
    ++until.tv_sec;
  }
  return pthread_cond_timedwait(condition, mutex, &until);
}

// gcc 11: std::__throw_bad_array_new_length, by what `new` itself calls.
[[noreturn]] void throw_array_too_long() __asm__("__cxa_throw_bad_array_new_length");
LMD_HIDDEN void throw_bad_array_new_length() __asm__("_ZSt28__throw_bad_array_new_lengthv");
void throw_bad_array_new_length() { throw_array_too_long(); }

// gcc 12: std::exception_ptr's count of references, by its copy and its end. A copy that never ends
// is one more. The headers' inline copy and end, which call these, are not meant: hence the
// version.
__asm__(".symver copy_exception_ptr, _ZNSt15__exception_ptr13exception_ptrC1ERKS0_@CXXABI_1.3.3");
__asm__(".symver end_exception_ptr, _ZNSt15__exception_ptr13exception_ptrD1Ev@CXXABI_1.3.3");
void copy_exception_ptr(void* copy, const void* pointer);
void end_exception_ptr(void* pointer);
LMD_HIDDEN void add_reference(void* pointer) noexcept
    __asm__("_ZNSt15__exception_ptr13exception_ptr9_M_addrefEv");
LMD_HIDDEN void release_reference(void* pointer) noexcept
    __asm__("_ZNSt15__exception_ptr13exception_ptr10_M_releaseEv");
void add_reference(void* pointer) noexcept {
  void* copy;
  copy_exception_ptr(&copy, pointer);
}
void release_reference(void* pointer) noexcept { end_exception_ptr(pointer); }

}  // extern "C"

#endif
