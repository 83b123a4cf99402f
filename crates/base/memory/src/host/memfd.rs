//! Memory that outlives the process that uses it: a sealed memfd and its mapping.
//!
//! The holder of the descriptor holds the memory. A supervisor keeps a duplicate, and gives it to
//! the successor of a process that died. The successor maps the memory and finds it as the last
//! instruction left it.
//!
//! The file is sealed against shrinking and growing. A mapping beyond the end of a file raises
//! SIGBUS; with the seal no holder of the descriptor, whatever it does, can bring that about.

use crate::host::huge_pages;
use rustix::fs::{FallocateFlags, MemfdFlags, SealFlags, SeekFrom};
use rustix::io::Errno;
use rustix::mm::{Advice, MapFlags, MlockFlags, ProtFlags};
use std::io;
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ptr::NonNull;

/// Bytes in the only size of huge pages that is used.
pub const HUGE_PAGE_BYTES: u64 = 2 << 20;

const SEALS: SealFlags = SealFlags::SHRINK.union(SealFlags::GROW).union(SealFlags::SEAL);

/// Kind of pages that back the memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Backing {
    /// Pages of the base size, committed when they are first written.
    BasePages,
    /// Huge pages of 2 MiB from the kernel's reserved pool, committed by [`SharedMemory::commit`].
    HugePages,
}

/// Why memory cannot be had.
#[derive(Debug, thiserror::Error)]
pub enum MemoryError {
    /// The kernel has no huge pages set aside, or too few.
    #[error(
        "{wanted} huge pages of 2 MiB are wanted and {free} are free; `{way_out}`, as root, sets \
         enough aside"
    )]
    NoHugePages {
        /// How many the memory takes.
        wanted: u64,
        /// How many the kernel can give.
        free: u64,
        /// The command that changes that.
        way_out: String,
    },
    /// The size is zero, not a multiple of the page size, or not addressable.
    #[error("{0} bytes is no size for shared memory: it must be a positive multiple of the page")]
    Size(u64),
    /// A descriptor was handed over that cannot be trusted to keep its size.
    #[error("the file handed over is not sealed memory made by `memfd_create`")]
    NotSealed,
    /// A system call failed.
    #[error("cannot {what} {bytes} bytes of shared memory")]
    Call {
        /// The failed action, as a verb for the message.
        what: &'static str,
        /// Size of the memory in bytes; 0 if unknown.
        bytes: u64,
        /// Error of the system call.
        #[source]
        source: io::Error,
    },
}

/// A memfd, mapped whole, readable and writable.
///
/// This type gives out the base address and no reference: what may be done with the bytes is
/// decided by the one type that owns it, [`Arena`](crate::arena::Arena) or
/// [`SharedWords`](crate::words::SharedWords).
#[derive(Debug)]
pub struct SharedMemory {
    fd: OwnedFd,
    base: NonNull<u8>,
    bytes: usize,
    backing: Backing,
}

// SAFETY: the mapping belongs to the process and not to a thread, and stays until the drop.
unsafe impl Send for SharedMemory {}
// SAFETY: the methods only read the fields; the memory itself is reached through the base address,
// whose users say how they share it.
unsafe impl Sync for SharedMemory {}

impl SharedMemory {
    /// New memory of zeros. The name is what `/proc/PID/maps` shows.
    pub fn create(name: &str, bytes: u64, backing: Backing) -> Result<SharedMemory, MemoryError> {
        let failed = |what| move |source: Errno| call_failed(what, bytes, source);
        let mut flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let unit = match backing {
            Backing::BasePages => crate::PAGE_SIZE as u64,
            Backing::HugePages => {
                flags |= MemfdFlags::HUGETLB | MemfdFlags::HUGE_2MB;
                huge_pages::check(bytes, None)?;
                HUGE_PAGE_BYTES
            }
        };
        if bytes == 0 || !bytes.is_multiple_of(unit) {
            return Err(MemoryError::Size(bytes));
        }
        let fd = rustix::fs::memfd_create(name, flags).map_err(failed("create"))?;
        rustix::fs::ftruncate(&fd, bytes).map_err(failed("size"))?;
        rustix::fs::fcntl_add_seals(&fd, SEALS).map_err(failed("seal"))?;
        SharedMemory::map(fd, bytes, backing)
    }

    /// The memory of a predecessor, from the descriptor that was kept of it.
    pub fn from_fd(fd: OwnedFd) -> Result<SharedMemory, MemoryError> {
        let failed = |what| move |source: Errno| call_failed(what, 0, source);
        let seals = rustix::fs::fcntl_get_seals(&fd).map_err(|_| MemoryError::NotSealed)?;
        if !seals.contains(SEALS) {
            return Err(MemoryError::NotSealed);
        }
        let bytes = rustix::fs::fstat(&fd).map_err(failed("look at"))?.st_size as u64;
        let file_system = rustix::fs::fstatfs(&fd).map_err(failed("look at"))?;
        let backing = match file_system.f_type {
            libc::HUGETLBFS_MAGIC => Backing::HugePages,
            _ => Backing::BasePages,
        };
        SharedMemory::map(fd, bytes, backing)
    }

    fn map(fd: OwnedFd, bytes: u64, backing: Backing) -> Result<SharedMemory, MemoryError> {
        let length = usize::try_from(bytes).map_err(|_| MemoryError::Size(bytes))?;
        // SAFETY: a fresh mapping where the kernel likes it touches no memory of the program.
        let base = unsafe {
            rustix::mm::mmap(
                std::ptr::null_mut(),
                length,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::SHARED | MapFlags::NORESERVE,
                &fd,
                0,
            )
        }
        .map_err(|source| call_failed("map", bytes, source))?;
        let base = NonNull::new(base.cast::<u8>()).ok_or(MemoryError::Size(bytes))?;
        let memory = SharedMemory { fd, base, bytes: length, backing };
        // Other people's pages have no place in this process's core dump.
        // SAFETY: the advice changes nothing about the contents of the mapping just made.
        unsafe { rustix::mm::madvise(base.as_ptr().cast(), length, Advice::LinuxDontDump) }
            .map_err(|source| call_failed("keep from core dumps", bytes, source))?;
        Ok(memory)
    }

    /// Where the memory begins; aligned to a page. It stays there as long as this value lives, and
    /// other threads and processes may write it at any time.
    pub fn base(&self) -> NonNull<u8> {
        self.base
    }

    /// How many bytes are mapped.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Kind of pages that back the memory.
    pub fn backing(&self) -> Backing {
        self.backing
    }

    /// Gives the memory of whole pages within the byte range back to the host; it reads as zeros.
    /// Partial pages of the backing, at both ends of the range, stay as they are.
    ///
    /// # Panics
    /// If the range is not within the memory.
    pub fn discard(&self, range: Range<u64>) -> io::Result<()> {
        assert!(range.start <= range.end && range.end <= self.bytes as u64, "{range:?} is outside");
        let unit = match self.backing {
            Backing::BasePages => crate::PAGE_SIZE as u64,
            Backing::HugePages => HUGE_PAGE_BYTES,
        };
        let start = range.start.next_multiple_of(unit);
        let end = range.end / unit * unit;
        if start >= end {
            return Ok(());
        }
        let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        uninterrupted(|| rustix::fs::fallocate(&self.fd, flags, start, end - start))
    }

    /// Takes memory from the host for the byte range now, and fails if there is none.
    ///
    /// With huge pages this must come before the first write: the pool may be empty by then, and
    /// the kernel reports that as SIGBUS. With base pages it is never needed.
    pub fn commit(&self, range: Range<u64>) -> io::Result<()> {
        let length = range.end - range.start;
        uninterrupted(|| {
            rustix::fs::fallocate(&self.fd, FallocateFlags::KEEP_SIZE, range.start, length)
        })
    }

    /// Bytes that the host has really given.
    pub fn committed_bytes(&self) -> io::Result<u64> {
        // Always in units of 512 bytes, whatever the file system's block is.
        Ok(rustix::fs::fstat(&self.fd)?.st_blocks as u64 * 512)
    }

    /// Locks the memory against swapping: all pages present now, and pages that this mapping
    /// touches later. A page written through the descriptor is locked once this mapping touches it.
    /// Swapped-out pages are read in first; only the caller waits for that.
    ///
    /// A process that holds the descriptor can lock the memory of another one that has died. Pages
    /// that cannot be locked are passed over, and the first error is returned. If a page is given
    /// back at the same moment, this may take it again.
    pub fn lock(&self) -> io::Result<()> {
        /// So much is locked by one call: other threads that map memory wait for it.
        const CHUNK: u64 = 64 << 20;
        let (mut outcome, end) = (Ok(()), self.bytes as u64);
        for start in (0..end).step_by(CHUNK as usize) {
            let chunk = start..end.min(start + CHUNK);
            let (at, bytes) = (self.at(start), (chunk.end - start) as usize);
            // SAFETY: locking changes nothing about the contents of the mapping, which is ours.
            let locked = unsafe { rustix::mm::mlock_with(at, bytes, MlockFlags::ONFAULT) };
            outcome = outcome.and(locked.map_err(io::Error::from)).and(self.bring_in(chunk));
        }
        outcome
    }

    /// Has all that there is of a byte range mapped here.
    fn bring_in(&self, range: Range<u64>) -> io::Result<()> {
        /// Few, so that hardly a page is given back between the look for data and the use.
        const AT_ONCE: u64 = 256 << 10;
        // Huge pages are never swapped, and their file does not tell holes from data.
        if self.backing == Backing::HugePages {
            return Ok(());
        }
        let (mut outcome, mut from) = (Ok(()), range.start);
        while from < range.end {
            // Other users of the descriptor do not read or write where it stands.
            let start = match rustix::fs::seek(&self.fd, SeekFrom::Data(from)) {
                Ok(start) if start < range.end => start,
                Ok(_) | Err(Errno::NXIO) => break,
                Err(error) => return outcome.and(Err(error.into())),
            };
            let end = rustix::fs::seek(&self.fd, SeekFrom::Hole(start))?;
            let end = end.min(range.end).min(start + AT_ONCE);
            // Read through the file, a page that is swapped out holds up none of this process's
            // other threads.
            for page in (start..end).step_by(crate::PAGE_SIZE) {
                let read = rustix::io::pread(&self.fd, &mut [0; 1], page);
                outcome = outcome.and(read.map(drop).map_err(io::Error::from));
            }
            let (at, bytes) = (self.at(start), (end - start) as usize);
            outcome = outcome.and(uninterrupted(|| {
                // SAFETY: the range is within the mapping, and reading a page changes nothing.
                unsafe { rustix::mm::madvise(at, bytes, Advice::LinuxPopulateRead) }
            }));
            from = end;
        }
        outcome
    }

    fn at(&self, offset: u64) -> *mut std::ffi::c_void {
        self.base.as_ptr().wrapping_add(offset as usize).cast()
    }

    /// Binds the byte range to one NUMA node. Pages that are already committed stay where they are.
    /// The rule belongs to the file and outlives the mapping.
    pub fn bind(&self, range: Range<u64>, node: u32) -> io::Result<()> {
        assert!(range.start <= range.end && range.end <= self.bytes as u64, "{range:?} is outside");
        crate::host::numa::bind(self.base, range, node)
    }
}

impl AsFd for SharedMemory {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

impl Drop for SharedMemory {
    fn drop(&mut self) {
        // SAFETY: whoever has the base address from here is gone: it is bound to this value's life.
        let unmapped = unsafe { rustix::mm::munmap(self.base.as_ptr().cast(), self.bytes) };
        debug_assert!(unmapped.is_ok(), "unmapping a whole mapping cannot fail");
    }
}

fn uninterrupted(mut call: impl FnMut() -> Result<(), Errno>) -> io::Result<()> {
    loop {
        match call() {
            Err(Errno::INTR) => {}
            result => return Ok(result?),
        }
    }
}

fn call_failed(what: &'static str, bytes: u64, source: Errno) -> MemoryError {
    MemoryError::Call { what, bytes, source: source.into() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn refuses_a_file_that_could_be_cut_short() {
        let fd = rustix::fs::memfd_create("unsealed", MemfdFlags::CLOEXEC).unwrap();
        rustix::fs::ftruncate(&fd, 4096).unwrap();
        assert!(matches!(SharedMemory::from_fd(fd), Err(MemoryError::NotSealed)));
        let file = std::fs::File::open("/dev/null").unwrap();
        assert!(matches!(SharedMemory::from_fd(file.into()), Err(MemoryError::NotSealed)));
    }

    #[test]
    fn nobody_can_cut_it_short() {
        let memory = SharedMemory::create("sealed", 8192, Backing::BasePages).unwrap();
        assert_eq!(rustix::fs::ftruncate(&memory, 4096), Err(Errno::PERM));
        assert_eq!(rustix::fs::ftruncate(&memory, 12288), Err(Errno::PERM));
    }

    /// Bytes that are present in a mapping of this process, if it is locked.
    fn locked_bytes(of: &SharedMemory) -> u64 {
        let smaps = std::fs::read_to_string("/proc/self/smaps").unwrap();
        let from = format!("{:x}-", of.base().as_ptr() as usize);
        let mut lines = smaps.lines().skip_while(|line| !line.starts_with(&from));
        let present = lines.find_map(|line| line.strip_prefix("Rss:")).unwrap();
        let flags = lines.find_map(|line| line.strip_prefix("VmFlags:")).unwrap();
        let kib: u64 = present.split_whitespace().next().unwrap().parse().unwrap();
        if flags.split_whitespace().any(|flag| flag == "lo") { kib << 10 } else { 0 }
    }

    #[test]
    fn what_it_holds_is_locked_and_no_hole_is_filled() {
        const MIB: u64 = 1 << 20;
        const PAGE: u64 = crate::PAGE_SIZE as u64;
        let memory = SharedMemory::create("locked", MIB, Backing::BasePages).unwrap();
        let write = |page: u64| {
            assert_eq!(rustix::io::pwrite(&memory, &[1; 100], page * PAGE), Ok(100));
        };
        write(7);
        write(200);
        // As a node has it of a volume's process that is dead.
        let fd = memory.as_fd().try_clone_to_owned().unwrap();
        let other = SharedMemory::from_fd(fd).unwrap();
        assert_eq!(locked_bytes(&other), 0);
        other.lock().unwrap();
        assert_eq!(locked_bytes(&other), 2 * PAGE);
        // SAFETY: the page is within the mapping, and nobody else uses it.
        unsafe { memory.base().add(20 * PAGE as usize).write_volatile(1) };
        write(255);
        assert_eq!(locked_bytes(&other), 2 * PAGE, "not used there");
        other.lock().unwrap();
        assert_eq!(locked_bytes(&other), 4 * PAGE);
        other.discard(0..MIB).unwrap();
        assert_eq!((locked_bytes(&other), other.committed_bytes().unwrap()), (0, 0));
        // SAFETY: as above.
        unsafe { other.base().write_volatile(1) };
        assert_eq!(locked_bytes(&other), PAGE);
    }

    #[test]
    fn refuses_what_is_no_size() {
        for bytes in [0, 1, 4097] {
            let refused = SharedMemory::create("size", bytes, Backing::BasePages);
            assert!(matches!(refused, Err(MemoryError::Size(size)) if size == bytes));
        }
    }
}
