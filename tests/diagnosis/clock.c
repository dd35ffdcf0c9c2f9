/* Shifts the wall clock of each process by the seconds in the file clock-PID of the folder that
   DIAGNOSIS_ORDERS names; to be preloaded. The monotonic clock is as it is. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static volatile long *shift_s;
static pid_t owner;
static int (*real)(clockid_t, struct timespec *);

static long shift(void) {
    if (owner != getpid()) {
        char path[4096];
        const char *folder = getenv("DIAGNOSIS_ORDERS");
        owner = getpid();
        shift_s = NULL;
        snprintf(path, sizeof path, "%s/clock-%d", folder ? folder : "/nonexistent", owner);
        int file = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
        if (file >= 0 && ftruncate(file, sizeof(long)) == 0) {
            void *found = mmap(NULL, sizeof(long), PROT_READ, MAP_SHARED, file, 0);
            shift_s = found == MAP_FAILED ? NULL : found;
        }
        if (file >= 0) close(file);
    }
    return shift_s ? *shift_s : 0;
}

int clock_gettime(clockid_t clock, struct timespec *now) {
    if (!real) real = (int (*)(clockid_t, struct timespec *))dlsym(RTLD_NEXT, "clock_gettime");
    int status = real(clock, now);
    if (status == 0 && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE))
        now->tv_sec += shift();
    return status;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone) {
    struct timespec time;
    (void)zone;
    int status = clock_gettime(CLOCK_REALTIME, &time);
    now->tv_sec = time.tv_sec;
    now->tv_usec = time.tv_nsec / 1000;
    return status;
}

time_t time(time_t *result) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (result) *result = now.tv_sec;
    return now.tv_sec;
}
