//! Locks memory (`mlock`, `mlockall`) within the local memory.
//!
//! The kernel brings in what is locked. With `mlockall` that would never end, because nobody serves
//! faults of the helper's area; and mappings that are locked as they are made would have pages
//! before the pager knows of them. So the kernel is asked to lock memory as it is touched
//! (MCL_ONFAULT), and the library brings it in by faults that the pager serves.
//!
//! Locked pages cannot be evicted. More of them than three quarters of the local memory are
//! refused, as the kernel refuses what exceeds RLIMIT_MEMLOCK.

use super::outcome::as_status;
use crate::{maps, own, sys};
use hecaton_uffd::Errno;
use hecaton_uffd::handover::Range;
use hecaton_uffd::sys::syscall;
use libc::{c_int, c_void, size_t};
use std::ffi::CStr;
use std::sync::atomic::{AtomicI32, AtomicU64, Ordering::Relaxed};

/// Most bytes of paged memory that may be locked.
#[unsafe(link_section = ".data")]
static LIMIT: AtomicU64 = AtomicU64::new(u64::MAX);
/// Bytes of files and the like that `mlockall` has locked, too.
#[unsafe(link_section = ".data")]
static OTHERS: AtomicU64 = AtomicU64::new(0);
/// The flags of `mlockall` for mappings to come, or 0.
#[unsafe(link_section = ".data")]
static FUTURE: AtomicI32 = AtomicI32::new(0);

/// Takes the local memory, in bytes, that the launcher gave; what is no number limits nothing.
pub(crate) fn limit(local: Option<&CStr>) {
    let bytes = local.and_then(|text| text.to_str().ok()?.parse::<u64>().ok());
    LIMIT.store(bytes.map_or(u64::MAX, |bytes| bytes / 4 * 3), Relaxed);
}

/// Whether a new mapping of `len` bytes is locked and may not be.
pub(super) fn refuses_new(len: usize) -> bool {
    FUTURE.load(Relaxed) != 0 && bytes_now() + len as u64 > LIMIT.load(Relaxed)
}

/// A file was mapped, or shared memory; if it is locked, it does not count.
pub(super) fn note_other(len: usize) {
    if FUTURE.load(Relaxed) != 0 {
        OTHERS.fetch_add(len.next_multiple_of(own::PAGE) as u64, Relaxed);
    }
}

/// Whether new mappings must be brought in.
pub(super) fn brings_in_new() -> bool {
    let flags = FUTURE.load(Relaxed);
    flags != 0 && flags & libc::MCL_ONFAULT == 0
}

/// Brings memory in, as a thread that touches each page would.
pub(super) fn bring_in(range: Range, is_written: bool) {
    let advice = if is_written { libc::MADV_POPULATE_WRITE } else { libc::MADV_POPULATE_READ };
    // SAFETY: contents stay as they are. As the kernel does, this leaves out unavailable pages.
    let _ = unsafe { sys::advise(range.start as usize, range.len as usize, advice as usize) };
}

/// Bytes that are locked, without [`OTHERS`].
fn bytes_now() -> u64 {
    let mut text = [0u8; 4096];
    let Ok(status) = sys::open(c"/proc/self/status") else { return 0 };
    let read = sys::read_at(status, &mut text, 0).unwrap_or(0);
    sys::close(status);
    let kilobytes = text[..read]
        .split(|&byte| byte == b'\n')
        .find_map(|line| line.strip_prefix(b"VmLck:"))
        .map_or(0, decimal);
    (kilobytes << 10).saturating_sub(OTHERS.load(Relaxed))
}

/// The first number in `text`.
fn decimal(text: &[u8]) -> u64 {
    let digits = text.iter().skip_while(|byte| !byte.is_ascii_digit());
    let digits = digits.take_while(|byte| byte.is_ascii_digit());
    digits.fold(0, |number, digit| number * 10 + u64::from(digit - b'0'))
}

/// The system calls; all take numbers, and lock or unlock pages without a change of contents.
fn call(number: libc::c_long, arguments: [usize; 3]) -> Result<(), Errno> {
    let [first, second, third] = arguments;
    // SAFETY: see above.
    unsafe { syscall(number, [first, second, third, 0, 0, 0]).map(drop) }
}

fn lock_on_fault(start: usize, len: usize) -> Result<(), Errno> {
    call(libc::SYS_mlock2, [start, len, libc::MLOCK_ONFAULT as usize])
}

fn unlock(start: usize, len: usize) {
    // An error means that the range is not mapped, and so not locked.
    let _ = call(libc::SYS_munlock, [start, len, 0]);
}

/// Locks as it is touched what is then known not to be too much.
fn lock_within_limit(start: usize, len: usize) -> Result<(), Errno> {
    let before = bytes_now();
    lock_on_fault(start, len)?;
    let after = bytes_now();
    if after > LIMIT.load(Relaxed) && after > before {
        unlock(start, len);
        return Err(Errno(libc::ENOMEM));
    }
    Ok(())
}

pub(super) unsafe extern "C" fn mlock(address: *const c_void, len: size_t) -> c_int {
    let start = address as usize;
    let locked = lock_within_limit(start, len);
    as_status(locked.and_then(|()| call(libc::SYS_mlock, [start, len, 0])))
}

pub(super) unsafe extern "C" fn mlock2(
    address: *const c_void,
    len: size_t,
    flags: libc::c_uint,
) -> c_int {
    let start = address as usize;
    let locked = lock_within_limit(start, len);
    as_status(locked.and_then(|()| call(libc::SYS_mlock2, [start, len, flags as usize])))
}

pub(super) unsafe extern "C" fn mlockall(flags: c_int) -> c_int {
    as_status(lock_all(flags))
}

fn lock_all(flags: c_int) -> Result<(), Errno> {
    let known = libc::MCL_CURRENT | libc::MCL_FUTURE | libc::MCL_ONFAULT;
    if flags & !known != 0 || flags & !libc::MCL_ONFAULT == 0 {
        return Err(Errno(libc::EINVAL));
    }
    let on_fault = libc::MCL_ONFAULT as usize;
    if flags & libc::MCL_CURRENT != 0 {
        lock_present(flags & libc::MCL_ONFAULT == 0)?;
    }
    if flags & libc::MCL_FUTURE != 0 {
        call(libc::SYS_mlockall, [libc::MCL_FUTURE as usize | on_fault, 0, 0])?;
    }
    FUTURE.store(if flags & libc::MCL_FUTURE != 0 { flags } else { 0 }, Relaxed);
    Ok(())
}

fn lock_present(brings_in: bool) -> Result<(), Errno> {
    let mappings = maps::open()?;
    let mut paged = 0;
    let listed = maps::for_each_anonymous(mappings, own::range(), |mapping| paged += mapping.len);
    let locked = listed.and_then(|()| {
        if paged > LIMIT.load(Relaxed) {
            return Err(Errno(libc::ENOMEM));
        }
        call(libc::SYS_mlockall, [(libc::MCL_CURRENT | libc::MCL_ONFAULT) as usize, 0, 0])?;
        let own = own::range();
        unlock(own.start as usize, own.len as usize);
        OTHERS.store(0, Relaxed);
        OTHERS.store(bytes_now().saturating_sub(paged), Relaxed);
        if brings_in {
            // Whatever was listed a moment ago; mappings that have gone are passed over.
            let _ = maps::for_each(mappings, own, |mapping| {
                bring_in(mapping.range, mapping.is_writable && mapping.is_private);
            });
        }
        Ok(())
    });
    sys::close(mappings);
    locked
}

pub(super) unsafe extern "C" fn munlockall() -> c_int {
    FUTURE.store(0, Relaxed);
    OTHERS.store(0, Relaxed);
    as_status(call(libc::SYS_munlockall, [0; 3]))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_found_in_a_line() {
        assert_eq!(decimal(b"\t    1234 kB"), 1234);
        assert_eq!(decimal(b" kB"), 0);
    }
}
