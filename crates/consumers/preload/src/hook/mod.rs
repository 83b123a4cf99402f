//! Sees every mapping that libc makes, its own allocator's included.
//!
//! glibc's `malloc` reaches `mmap` and `brk` by internal calls that no interposed symbol catches.
//! Those internal names are the same functions as the exported ones, though, so the functions
//! themselves are replaced: their first instructions become a jump to ours, which makes the system
//! call and registers what it mapped. A program that makes the system call by itself (Go's runtime)
//! is not seen here; the pager finds such memory from outside, a little later. The system calls
//! that make children are replaced too, see [`sites`].
//!
//! Rejected: polling `/proc/self/maps` alone (a program fills a new mapping faster than any poll);
//! seccomp notification (forbids set-user-id programs, and every mapping waits for two context
//! switches); an allocator of our own (changes the program).

mod cores;
mod locked;
mod outcome;
mod patch;
mod registered;
mod room;
mod sites;

use crate::attach;
use crate::failure::Failure;
use crate::fork;
use crate::hypervisor::guest;
use crate::own::{KEPT_BY_PROGRAM, LEFT_ALONE};
use crate::turn::{Act, Alone, Together};
use crate::{exec, own, sys, withhold};
use hecaton_uffd::Errno;
use hecaton_uffd::handover::Range;
use hecaton_uffd::sys::syscall;
use libc::{c_int, c_void, off_t, size_t};
use outcome::{as_address, as_status, fail};
use own::PAGE;
use patch::{jump_to, replace, write_code};
use std::ffi::CStr;
use std::sync::atomic::Ordering::Relaxed;

/// Takes the limits that the launcher gave, as decimal bytes: the largest mapping, and the local
/// memory.
pub(crate) fn limit([largest, local]: [Option<&CStr>; 2]) {
    room::limit(largest);
    locked::limit(local);
}

/// Replaces libc's `fork`, without which a program must not run, and its `mmap`, `munmap`,
/// `mremap`, `madvise`, `brk`, `mlock` and `mlockall`, and those that start programs. Where those
/// are not found, the pager's own search is all there is.
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
        let replacements = [
            (c"mmap", mmap as *const ()),
            (c"munmap", munmap as *const ()),
            (c"mremap", mremap as *const ()),
            (c"madvise", madvise as *const ()),
            (c"mlock", locked::mlock as *const ()),
            (c"mlock2", locked::mlock2 as *const ()),
            (c"mlockall", locked::mlockall as *const ()),
            (c"munlockall", locked::munlockall as *const ()),
            (c"ioctl", registered::ioctl as *const ()),
            (c"prctl", prctl as *const ()),
            (c"execve", exec::execve as *const ()),
            (c"execveat", exec::execveat as *const ()),
            (c"fexecve", exec::fexecve as *const ()),
        ];
        for (name, ours) in replacements {
            replace(libc::dlsym(libc_handle, name.as_ptr()), ours);
        }
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

unsafe extern "C" fn mmap(
    address: *mut c_void,
    len: size_t,
    prot: c_int,
    flags: c_int,
    fd: c_int,
    offset: off_t,
) -> *mut c_void {
    let kind = Kind::of(flags);
    let is_charged = prot & libc::PROT_WRITE != 0 && flags & libc::MAP_NORESERVE == 0;
    if kind == Kind::Paged && is_charged && room::is_too_large(len) {
        return as_address(Err(Errno(libc::ENOMEM)));
    }
    if kind != Kind::Other && locked::refuses_new(len) {
        return as_address(Err(Errno(libc::EAGAIN)));
    }
    // A filter of system calls that knows this call may not know the one that brings pages in.
    let is_brought_in = !own::is_filtered()
        && flags & (libc::MAP_POPULATE | libc::MAP_NONBLOCK) == libc::MAP_POPULATE;
    let flags = match kind {
        // Not charged to the host: see `room`.
        Kind::Paged => flags | libc::MAP_NORESERVE,
        _ => flags,
    };
    // Pages come when the pager knows of the memory, and others need not wait for them.
    let flags = if is_brought_in { flags & !libc::MAP_POPULATE } else { flags };
    // SAFETY: the caller's promises are those of mmap.
    let mapped = unsafe { map_and_register(kind, address, len, [prot, flags, fd], offset) };
    if kind == Kind::Other && mapped.is_ok() {
        locked::note_other(len);
    }
    if let Ok(start) = mapped
        && (is_brought_in || locked::brings_in_new())
    {
        let range = Range { start: start as u64, len: len.next_multiple_of(PAGE) as u64 };
        // As the kernel does it.
        let is_private = flags & libc::MAP_TYPE == libc::MAP_PRIVATE;
        locked::bring_in(range, is_private && prot & libc::PROT_WRITE != 0);
    }
    as_address(mapped)
}

/// Kind of a mapping, by its flags.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    /// Private memory.
    Paged,
    /// Private memory that stays local: stacks, and what may not be paged (locked) or is not in
    /// pages of 4 KiB.
    Local,
    /// Files, and what is shared.
    Other,
}

impl Kind {
    fn of(flags: c_int) -> Kind {
        let never = libc::MAP_STACK | libc::MAP_GROWSDOWN | libc::MAP_HUGETLB | libc::MAP_LOCKED;
        let is_private_memory =
            flags & libc::MAP_TYPE == libc::MAP_PRIVATE && flags & libc::MAP_ANONYMOUS != 0;
        match (is_private_memory, flags & never) {
            (true, 0) => Kind::Paged,
            (true, _) => Kind::Local,
            (false, _) => Kind::Other,
        }
    }
}

/// Makes a mapping in its turn, and notes or registers it.
///
/// # Safety
/// As for mmap.
unsafe fn map_and_register(
    kind: Kind,
    address: *mut c_void,
    len: size_t,
    numbers: [c_int; 3],
    offset: off_t,
) -> Result<usize, Errno> {
    let _turn = match kind {
        Kind::Local => (None, Some(Alone::new(Act::Other)?)),
        _ => (Some(Together::new()), None),
    };
    // SAFETY: the caller's promise.
    let start = unsafe { map(address, len, numbers, offset) }?;
    let range = Range { start: start as u64, len: len.next_multiple_of(PAGE) as u64 };
    if kind != Kind::Other {
        KEPT_BY_PROGRAM.forget(range);
    }
    match kind {
        Kind::Paged => {
            LEFT_ALONE.forget(range);
            attach::register(range.start, range.len);
        }
        Kind::Local => LEFT_ALONE.note(range),
        Kind::Other => {}
    }
    Ok(start)
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
    as_address(mapped.and_then(|start| {
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

unsafe extern "C" fn madvise(address: *mut c_void, len: size_t, advice: c_int) -> c_int {
    if advice == libc::MADV_DODUMP {
        return as_status(cores::let_cores_have(address as usize, len));
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
    let mut advised = unsafe { sys::advise(address as usize, len, advice as usize) };
    if advice == libc::MADV_FREE && advised.is_ok() && own::is_paged() {
        // The pager hears that the pages are gone, but the kernel keeps them while it has room, and
        // nobody would count them.
        // SAFETY: the program must be ready to find zeros; the kernel has found the memory fit.
        advised = unsafe { sys::dont_need(address as usize, len) };
    }
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

unsafe extern "C" fn prctl(
    option: c_int,
    second: usize,
    third: usize,
    fourth: usize,
    fifth: usize,
) -> c_int {
    if option == libc::PR_SET_SECCOMP {
        // Before it has an effect.
        own::become_filtered();
    }
    // SAFETY: the caller's promises are those of prctl.
    let done =
        unsafe { syscall(libc::SYS_prctl, [option as usize, second, third, fourth, fifth, 0]) };
    match done {
        Ok(value) => value as c_int,
        Err(errno) => as_status(Err(errno)),
    }
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
        return as_address(Err(Errno(libc::ENOMEM)));
    }
    let is_replaced = flags & libc::MREMAP_FIXED != 0;
    let _turn = match Alone::new(if is_replaced { Act::Replace } else { Act::Other }) {
        Ok(turn) => turn,
        Err(errno) => return as_address(Err(errno)),
    };
    let has_place = flags & (libc::MREMAP_FIXED | libc::MREMAP_DONTUNMAP) != 0;
    let to = if has_place { to as usize } else { 0 };
    // SAFETY: the caller's promises are those of mremap.
    as_address(unsafe {
        syscall(libc::SYS_mremap, [address as usize, len, new_len, flags as usize, to, 0])
    })
}

unsafe extern "C" fn brk(wanted: *mut c_void) -> c_int {
    let current = CURRENT_BREAK.load(Relaxed);
    let turn = Together::new();
    // SAFETY: the kernel answers with the break that is in force; `current` is libc's variable,
    // which libc's own brk writes as we do, without a lock.
    let grown = unsafe {
        let before = *current;
        if locked::refuses_new((wanted as usize).saturating_sub(before)) {
            fail(Errno(libc::ENOMEM));
            return -1;
        }
        let Ok(now) = syscall(libc::SYS_brk, [wanted as usize, 0, 0, 0, 0, 0]) else { return -1 };
        *current = now;
        if now < wanted as usize {
            fail(Errno(libc::ENOMEM));
            return -1;
        }
        let (from, to) = (before.next_multiple_of(PAGE), now.next_multiple_of(PAGE));
        let grown = Range { start: from as u64, len: to.saturating_sub(from) as u64 };
        if before == 0 || grown.len == 0 {
            return 0;
        }
        attach::register(grown.start, grown.len);
        grown
    };
    drop(turn);
    if locked::brings_in_new() {
        locked::bring_in(grown, true);
    }
    0
}
