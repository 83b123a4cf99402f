//! Sees every mapping that libc makes, its own allocator's included.
//!
//! glibc's `malloc` reaches `mmap` and `brk` by internal calls that no interposed symbol catches.
//! Those internal names are the same functions as the exported ones, though, so the functions
//! themselves are replaced: their first instructions become a jump to ours, which makes the system
//! call and registers what it mapped. A program that makes the system call by itself (Go's runtime)
//! is not seen here; the pager finds such memory from outside, a little later.
//!
//! Rejected: polling `/proc/self/maps` alone (a program fills a new mapping faster than any poll);
//! seccomp notification (forbids set-user-id programs, and every mapping waits for two context
//! switches); an allocator of our own (changes the program).

use crate::{attach, guest, sys};
use hecaton_uffd::Errno;
use hecaton_uffd::handover::Range;
use hecaton_uffd::sys::syscall;
use libc::{c_int, c_void, off_t, size_t};

const PAGE: usize = 4096;

/// Replaces libc's `mmap` and `brk`. Where the text cannot be written (a hardened system), nothing
/// is replaced and the pager's own search is all there is. True if `mmap` was.
pub(crate) fn install() -> bool {
    // SAFETY: dlopen with RTLD_NOLOAD only looks up what is loaded; libc stays loaded for good, so
    // the handle's reference is not given back.
    unsafe {
        let libc_handle = libc::dlopen(c"libc.so.6".as_ptr(), libc::RTLD_LAZY | libc::RTLD_NOLOAD);
        if libc_handle.is_null() {
            return false;
        }
        // Of a hypervisor only what it maps shared is of interest.
        let curbrk = libc::dlsym(libc_handle, c"__curbrk".as_ptr());
        if !curbrk.is_null() && !guest::is_on() {
            CURRENT_BREAK.store(curbrk.cast(), std::sync::atomic::Ordering::Relaxed);
            replace(libc::dlsym(libc_handle, c"brk".as_ptr()), brk as *const ());
        }
        replace(libc::dlsym(libc_handle, c"mmap".as_ptr()), mmap as *const ())
    }
}

/// libc's own record of the break, which `sbrk` reads.
static CURRENT_BREAK: std::sync::atomic::AtomicPtr<usize> =
    std::sync::atomic::AtomicPtr::new(std::ptr::null_mut());

#[cfg(target_arch = "x86_64")]
fn jump_to(target: usize) -> [u8; 14] {
    // jmp [rip + 0]; the address
    let mut code = [0xff, 0x25, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];
    code[6..].copy_from_slice(&target.to_le_bytes());
    code
}

#[cfg(target_arch = "aarch64")]
fn jump_to(target: usize) -> [u8; 16] {
    // ldr x16, #8; br x16; the address
    let mut code = [0x50, 0, 0, 0x58, 0, 2, 0x1f, 0xd6, 0, 0, 0, 0, 0, 0, 0, 0];
    code[8..].copy_from_slice(&target.to_le_bytes());
    code
}

/// # Safety
/// `function` is null or the start of a function of at least 16 bytes with `target`'s signature,
/// and no thread is running its first instructions: the program has only this thread yet.
unsafe fn replace(function: *mut c_void, target: *const ()) -> bool {
    if function.is_null() {
        return false;
    }
    let code = jump_to(target as usize);
    let first = function as usize & !(PAGE - 1);
    let end = (function as usize + code.len()).next_multiple_of(PAGE);
    let text = libc::PROT_READ | libc::PROT_EXEC;
    // SAFETY: the pages stay readable and executable throughout, for other functions on them. A
    // private file mapping is copied when written, so no other process sees it.
    unsafe {
        let writable = sys::protect(first, end - first, text | libc::PROT_WRITE).is_ok();
        if writable {
            std::ptr::copy_nonoverlapping(code.as_ptr(), function.cast(), code.len());
            #[cfg(target_arch = "aarch64")]
            flush_instruction_cache(function as usize, code.len());
            let _ = sys::protect(first, end - first, text);
        }
        writable
    }
}

#[cfg(target_arch = "aarch64")]
unsafe fn flush_instruction_cache(start: usize, len: usize) {
    for line in (start & !63..start + len).step_by(64) {
        // SAFETY: cache maintenance on mapped text.
        unsafe {
            std::arch::asm!("dc cvau, {0}", "dsb ish", "ic ivau, {0}", "dsb ish", "isb", in(reg) line)
        };
    }
}

fn fail(errno: Errno) {
    // SAFETY: the calling thread's errno.
    unsafe { *libc::__errno_location() = errno.0 };
}

unsafe extern "C" fn mmap(
    address: *mut c_void,
    len: size_t,
    prot: c_int,
    flags: c_int,
    fd: c_int,
    offset: off_t,
) -> *mut c_void {
    // SAFETY: the caller's promises are those of mmap.
    let mapped = unsafe {
        let args =
            [address as usize, len, prot as usize, flags as usize, fd as usize, offset as usize];
        syscall(libc::SYS_mmap, args)
    };
    match mapped {
        Ok(start) => {
            // Stacks stay local, as does what may not be paged (locked) or is not 4 KiB pages.
            let pageable = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
            let never =
                libc::MAP_STACK | libc::MAP_GROWSDOWN | libc::MAP_HUGETLB | libc::MAP_LOCKED;
            if guest::is_on() {
                let shared = flags & libc::MAP_TYPE != libc::MAP_PRIVATE;
                let refused = shared && fd >= 0 && {
                    let mapping =
                        Range { start: start as u64, len: len.next_multiple_of(PAGE) as u64 };
                    guest::mapped(mapping, fd, offset as u64).is_err()
                };
                if refused {
                    // SAFETY: mapped just now, and the caller is told that it was not.
                    unsafe { sys::unmap(start, len) };
                    fail(Errno(libc::ENOMEM));
                    return libc::MAP_FAILED;
                }
            } else if flags & libc::MAP_TYPE == libc::MAP_PRIVATE
                && flags & pageable == pageable
                && flags & never == 0
            {
                attach::register(start as u64, len.next_multiple_of(PAGE) as u64);
            }
            start as *mut c_void
        }
        Err(errno) => {
            fail(errno);
            libc::MAP_FAILED
        }
    }
}

unsafe extern "C" fn brk(wanted: *mut c_void) -> c_int {
    let current = CURRENT_BREAK.load(std::sync::atomic::Ordering::Relaxed);
    // SAFETY: the kernel answers with the break that is in force; `current` is libc's variable,
    // which libc's own brk writes as we do, without a lock.
    unsafe {
        let before = *current;
        let Ok(now) = syscall(libc::SYS_brk, [wanted as usize, 0, 0, 0, 0, 0]) else { return -1 };
        *current = now;
        if now < wanted as usize {
            fail(Errno(libc::ENOMEM));
            return -1;
        }
        let (from, to) = (before.next_multiple_of(PAGE), now.next_multiple_of(PAGE));
        if before != 0 && from < to {
            attach::register(from as u64, (to - from) as u64);
        }
    }
    0
}
