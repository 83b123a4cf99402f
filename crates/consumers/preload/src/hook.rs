//! Sees every mapping that libc makes, its own allocator's included.
//!
//! glibc's `malloc` reaches `mmap` and `brk` by internal calls that no interposed symbol catches.
//! Those internal names are the same functions as the exported ones, though, so the functions
//! themselves are replaced: their first instructions become a jump to ours, which makes the system
//! call and registers what it mapped. A program that makes the system call by itself (Go's runtime)
//! is not seen here; the pager finds such memory from outside, a little later. What makes children
//! is replaced too, see [`crate::sites`].
//!
//! Rejected: polling `/proc/self/maps` alone (a program fills a new mapping faster than any poll);
//! seccomp notification (forbids set-user-id programs, and every mapping waits for two context
//! switches); an allocator of our own (changes the program).

use crate::attach::{self, Failure};
use crate::fork;
use crate::hypervisor::guest;
use crate::own::{KEPT_BY_PROGRAM, LEFT_ALONE};
use crate::turn::{Act, Alone, Together};
use crate::{exec, own, room, sites, sys, withhold};
use hecaton_uffd::Errno;
use hecaton_uffd::handover::Range;
use hecaton_uffd::sys::syscall;
use libc::{c_int, c_void, off_t, size_t};
use own::PAGE;
use std::sync::atomic::Ordering::Relaxed;

/// Replaces libc's `fork`, without which a program must not run, its `mmap`, `munmap`, `mremap`,
/// `madvise` and `brk`, and those that start programs. Where those are not found, the pager's own search is all there is.
pub(crate) fn install() -> Result<(), Failure> {
    // SAFETY: dlopen with RTLD_NOLOAD only looks up what is loaded; libc stays loaded for good, so
    // the handle's reference is not given back.
    unsafe {
        let libc_handle = libc::dlopen(c"libc.so.6".as_ptr(), libc::RTLD_LAZY | libc::RTLD_NOLOAD);
        if libc_handle.is_null() {
            return Err(Failure(
                "the program does not use the GNU C library",
                Errno(libc::ENOTSUP),
            ));
        }
        fork::prepare();
        sites::install(libc_handle)?;
        let curbrk = libc::dlsym(libc_handle, c"__curbrk".as_ptr());
        if !curbrk.is_null() {
            CURRENT_BREAK.store(curbrk.cast(), Relaxed);
            replace(libc::dlsym(libc_handle, c"brk".as_ptr()), brk as *const ());
        }
        replace(libc::dlsym(libc_handle, c"mmap".as_ptr()), mmap as *const ());
        replace(libc::dlsym(libc_handle, c"munmap".as_ptr()), munmap as *const ());
        replace(libc::dlsym(libc_handle, c"mremap".as_ptr()), mremap as *const ());
        replace(libc::dlsym(libc_handle, c"madvise".as_ptr()), madvise as *const ());
        replace(libc::dlsym(libc_handle, c"execve".as_ptr()), exec::execve as *const ());
        replace(libc::dlsym(libc_handle, c"execveat".as_ptr()), exec::execveat as *const ());
        replace(libc::dlsym(libc_handle, c"fexecve".as_ptr()), exec::fexecve as *const ());
    }
    Ok(())
}

/// Replaces libc's `mmap` alone, in a hypervisor: only what it maps shared is of interest. False if
/// that cannot be done.
pub(crate) fn install_in_hypervisor() -> bool {
    // SAFETY: as in `install`. The function is one of libc's, and long enough.
    unsafe {
        let libc_handle = libc::dlopen(c"libc.so.6".as_ptr(), libc::RTLD_LAZY | libc::RTLD_NOLOAD);
        if libc_handle.is_null() {
            return false;
        }
        let function = libc::dlsym(libc_handle, c"mmap".as_ptr());
        let target = mmap_in_hypervisor as *const () as usize;
        !function.is_null() && write_code(function as usize, &jump_to(target)).is_ok()
    }
}

/// libc's own record of the break, which `sbrk` reads.
static CURRENT_BREAK: std::sync::atomic::AtomicPtr<usize> =
    std::sync::atomic::AtomicPtr::new(std::ptr::null_mut());

fn jump_to(target: usize) -> [u8; 14] {
    // jmp [rip + 0]; the address
    let mut code = [0xff, 0x25, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];
    code[6..].copy_from_slice(&target.to_le_bytes());
    code
}

/// # Safety
/// `function` is null or the start of a function of at least 14 bytes with `target`'s signature,
/// and no thread is running its first instructions: the program has only this thread yet.
unsafe fn replace(function: *mut c_void, target: *const ()) {
    if !function.is_null() {
        // SAFETY: the caller's promise. If the text cannot be written, the function stays as it is.
        let _ = unsafe { write_code(function as usize, &jump_to(target as usize)) };
    }
}

/// # Safety
/// `at` is within text, and its bytes may be replaced at this moment.
pub(crate) unsafe fn write_code(at: usize, code: &[u8]) -> Result<(), Errno> {
    let first = at & !(PAGE - 1);
    let end = (at + code.len()).next_multiple_of(PAGE);
    let text = libc::PROT_READ | libc::PROT_EXEC;
    // SAFETY: the pages stay readable and executable throughout, for other functions on them. A
    // private file mapping is copied when written, so no other process sees it.
    unsafe {
        sys::protect(first, end - first, text | libc::PROT_WRITE)?;
        std::ptr::copy_nonoverlapping(code.as_ptr(), at as *mut u8, code.len());
        sys::protect(first, end - first, text)
    }
}

fn fail(errno: Errno) {
    // SAFETY: the calling thread's errno.
    unsafe { *libc::__errno_location() = errno.0 };
}

/// The system call `mmap`, for our own versions of libc's function.
///
/// # Safety
/// As for mmap.
unsafe fn map(
    address: *mut c_void,
    len: size_t,
    [prot, flags, fd]: [c_int; 3],
    offset: off_t,
) -> Result<usize, Errno> {
    let [prot, flags, fd] = [prot as usize, flags as usize, fd as usize];
    // SAFETY: the caller's promises are those of mmap.
    unsafe { syscall(libc::SYS_mmap, [address as usize, len, prot, flags, fd, offset as usize]) }
}

/// What libc's `mmap` returns for the system call's outcome.
fn as_libc_says(mapped: Result<usize, Errno>) -> *mut c_void {
    match mapped {
        Ok(start) => start as *mut c_void,
        Err(errno) => {
            fail(errno);
            libc::MAP_FAILED
        }
    }
}

/// The same of functions that return no address.
fn as_status(done: Result<(), Errno>) -> c_int {
    match done {
        Ok(()) => 0,
        Err(errno) => {
            fail(errno);
            -1
        }
    }
}

unsafe extern "C" fn mmap(
    address: *mut c_void,
    len: size_t,
    prot: c_int,
    flags: c_int,
    fd: c_int,
    offset: off_t,
) -> *mut c_void {
    // Stacks stay local, as does what may not be paged (locked) or is not 4 KiB pages.
    let never = libc::MAP_STACK | libc::MAP_GROWSDOWN | libc::MAP_HUGETLB | libc::MAP_LOCKED;
    let is_private_memory =
        flags & libc::MAP_TYPE == libc::MAP_PRIVATE && flags & libc::MAP_ANONYMOUS != 0;
    let stays_local = flags & never != 0;
    let _turn = if is_private_memory && stays_local {
        (None, Some(Alone::new(Act::Other)))
    } else {
        (Some(Together::new()), None)
    };
    let is_charged = prot & libc::PROT_WRITE != 0 && flags & libc::MAP_NORESERVE == 0;
    let is_paged = is_private_memory && !stays_local;
    if is_paged && is_charged && room::is_too_large(len) {
        return as_libc_says(Err(Errno(libc::ENOMEM)));
    }
    // What is paged is not charged to the host: see `room`.
    let flags = if is_paged { flags | libc::MAP_NORESERVE } else { flags };
    // SAFETY: the caller's promises are those of mmap.
    let mapped = unsafe { map(address, len, [prot, flags, fd], offset) };
    if let Ok(start) = mapped
        && is_private_memory
    {
        let range = Range { start: start as u64, len: len.next_multiple_of(PAGE) as u64 };
        KEPT_BY_PROGRAM.forget(range);
        if stays_local {
            LEFT_ALONE.note(range);
        } else {
            LEFT_ALONE.forget(range);
            attach::register(range.start, range.len);
        }
    }
    as_libc_says(mapped)
}

unsafe extern "C" fn mmap_in_hypervisor(
    address: *mut c_void,
    len: size_t,
    prot: c_int,
    flags: c_int,
    fd: c_int,
    offset: off_t,
) -> *mut c_void {
    // SAFETY: the caller's promises are those of mmap.
    let mapped = unsafe { map(address, len, [prot, flags, fd], offset) };
    as_libc_says(mapped.and_then(|start| {
        let region = Range { start: start as u64, len: len.next_multiple_of(PAGE) as u64 };
        let shared = flags & libc::MAP_TYPE != libc::MAP_PRIVATE && fd >= 0;
        if shared && guest::mapped(region, fd, offset as u64).is_err() {
            // SAFETY: mapped just now, and the caller is told that it was not.
            unsafe { sys::unmap(start, len) };
            return Err(Errno(libc::ENOMEM));
        }
        Ok(start)
    }))
}

/// MADV_DODUMP for libc's `madvise` and `syscall`: false zeros must not get into core files.
pub(crate) fn let_cores_have(start: usize, len: size_t) -> Result<(), Errno> {
    if !start.is_multiple_of(PAGE) || len.checked_next_multiple_of(PAGE).is_none() {
        return Err(Errno(libc::EINVAL));
    }
    let _turn = Alone::new(Act::Other);
    withhold::let_cores_have(Range { start: start as u64, len: len.next_multiple_of(PAGE) as u64 })
}

unsafe extern "C" fn madvise(address: *mut c_void, len: size_t, advice: c_int) -> c_int {
    if advice == libc::MADV_DODUMP {
        return as_status(let_cores_have(address as usize, len));
    }
    let range = Range { start: address as u64, len: len.next_multiple_of(PAGE) as u64 };
    // Other advice may wait for the pager to read of it, and is no affair of forks.
    let is_of_forks = matches!(
        advice,
        libc::MADV_DONTFORK | libc::MADV_DOFORK | libc::MADV_WIPEONFORK | libc::MADV_KEEPONFORK
    );
    let _turn = is_of_forks.then(Together::new);
    if advice == libc::MADV_WIPEONFORK {
        // Before it has an effect, so that no child is missed.
        own::note_wipe_on_fork();
    }
    // SAFETY: the caller's promises are those of madvise.
    let advised = unsafe { sys::advise(address as usize, len, advice as usize) };
    match advice {
        libc::MADV_DONTFORK => KEPT_BY_PROGRAM.note(range),
        libc::MADV_DOFORK => {
            KEPT_BY_PROGRAM.forget(range);
            withhold::resume();
        }
        _ => {}
    }
    as_status(advised)
}

unsafe extern "C" fn munmap(address: *mut c_void, len: size_t) -> c_int {
    let _turn = Together::new();
    // SAFETY: the caller's promises are those of munmap.
    as_status(unsafe { syscall(libc::SYS_munmap, [address as usize, len, 0, 0, 0, 0]) }.map(drop))
}

/// The kernel keeps what is moved registered.
unsafe extern "C" fn mremap(
    address: *mut c_void,
    len: size_t,
    new_len: size_t,
    flags: c_int,
    to: *mut c_void,
) -> *mut c_void {
    if new_len > len && room::is_too_large(new_len) {
        return as_libc_says(Err(Errno(libc::ENOMEM)));
    }
    let _turn = Alone::new(Act::Other);
    let has_place = flags & (libc::MREMAP_FIXED | libc::MREMAP_DONTUNMAP) != 0;
    let to = if has_place { to as usize } else { 0 };
    // SAFETY: the caller's promises are those of mremap.
    as_libc_says(unsafe {
        syscall(libc::SYS_mremap, [address as usize, len, new_len, flags as usize, to, 0])
    })
}

unsafe extern "C" fn brk(wanted: *mut c_void) -> c_int {
    let _turn = Together::new();
    let current = CURRENT_BREAK.load(Relaxed);
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
