/* A disk that fails at a chosen moment. Preloaded into a process, it counts what changes files whose path contains
   DISK_PATH: opening for writing, write, fsync, rename, mkdir, unlink. The count is in DISK_COUNT, a file of eight
   bytes that all processes share. At number DISK_AT it strikes, as DISK_DOES says:

     kill   half of the bytes are written, and the process is killed
     full   half of the bytes are written; from then on there is no space left

   `disk_arm` sets the same in a running process. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <unistd.h>

static const char *where;
static long *count, at;
static int full;

static int real_open(const char *path, int flags) {
  static int (*real)(const char *, int, ...);
  if (!real) real = dlsym(RTLD_NEXT, "open");
  return real(path, flags);
}

void disk_arm(const char *path, const char *counter, long moment, int is_full) {
  int file = real_open(counter, O_RDWR);
  if (file < 0) return;
  count = mmap(NULL, 8, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  close(file);
  where = strdup(path), at = moment, full = is_full;
}

__attribute__((constructor)) static void from_environment(void) {
  const char *path = getenv("DISK_PATH"), *counter = getenv("DISK_COUNT"), *moment = getenv("DISK_AT");
  const char *does = getenv("DISK_DOES");
  if (path && counter && moment) disk_arm(path, counter, atol(moment), does && !strcmp(does, "full"));
}

/* 0: go on; 1: this is the moment; 2: it is past. */
static int struck(const char *path) {
  if (!where || !path || !strstr(path, where)) return 0;
  long now = __atomic_add_fetch(count, 1, __ATOMIC_SEQ_CST);
  if (!at || now < at) return 0;
  return now == at ? 1 : 2;
}

static const char *path_of(int file, char *room) {
  char link[64];
  snprintf(link, sizeof link, "/proc/self/fd/%d", file);
  ssize_t size = readlink(link, room, PATH_MAX - 1);
  room[size < 0 ? 0 : size] = 0;
  return room;
}

/* Whether the call is refused; does not come back from a kill. */
static int refused(int now) {
  if (!now) return 0;
  if (!full) kill(getpid(), SIGKILL), pause();
  errno = ENOSPC;
  return 1;
}

#define REAL(result, name, ...) \
  static result (*real)(__VA_ARGS__); \
  if (!real) real = dlsym(RTLD_NEXT, name)

#define OPENS(name) \
  int name(const char *path, int flags, ...) { \
    REAL(int, #name, const char *, int, ...); \
    va_list rest; \
    va_start(rest, flags); \
    int mode = va_arg(rest, int); \
    va_end(rest); \
    if (flags & (O_WRONLY | O_RDWR | O_CREAT) && refused(struck(path))) return -1; \
    return real(path, flags, mode); \
  }
#define OPENS_AT(name) \
  int name(int folder, const char *path, int flags, ...) { \
    REAL(int, #name, int, const char *, int, ...); \
    va_list rest; \
    va_start(rest, flags); \
    int mode = va_arg(rest, int); \
    va_end(rest); \
    if (flags & (O_WRONLY | O_RDWR | O_CREAT) && refused(struck(path))) return -1; \
    return real(folder, path, flags, mode); \
  }
OPENS(open)
OPENS(open64)
OPENS_AT(openat)
OPENS_AT(openat64)

ssize_t write(int file, const void *bytes, size_t size) {
  REAL(ssize_t, "write", int, const void *, size_t);
  char room[PATH_MAX];
  int now = where ? struck(path_of(file, room)) : 0;
  if (now == 1 && size > 1) {
    ssize_t done = real(file, bytes, size / 2);
    if (full) return done;
  }
  return refused(now) ? -1 : real(file, bytes, size);
}

#define PWRITES(name, offset_t) \
  ssize_t name(int file, const void *bytes, size_t size, offset_t place) { \
    REAL(ssize_t, #name, int, const void *, size_t, offset_t); \
    char room[PATH_MAX]; \
    int now = where ? struck(path_of(file, room)) : 0; \
    if (now == 1 && size > 1) real(file, bytes, size / 2, place); \
    return refused(now) ? -1 : real(file, bytes, size, place); \
  }
PWRITES(pwrite, off_t)
PWRITES(pwrite64, off64_t)

int fsync(int file) {
  REAL(int, "fsync", int);
  char room[PATH_MAX];
  return where && refused(struck(path_of(file, room))) ? -1 : real(file);
}

/* Names can be given and taken on a full disk, too. */
static int struck_name(const char *path) {
  int now = struck(path);
  return full ? 0 : now;
}

int rename(const char *from, const char *to) {
  REAL(int, "rename", const char *, const char *);
  return refused(struck_name(to)) ? -1 : real(from, to);
}

int unlink(const char *path) {
  REAL(int, "unlink", const char *);
  return refused(struck_name(path)) ? -1 : real(path);
}

int mkdir(const char *path, mode_t mode) {
  REAL(int, "mkdir", const char *, mode_t);
  return refused(struck(path)) ? -1 : real(path, mode);
}
