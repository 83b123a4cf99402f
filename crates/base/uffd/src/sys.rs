//! The ioctls as functions. The only module that makes them.
//!
//! They are raw system calls, not libc's `ioctl`, because the preload library makes them in a
//! thread that has no thread-local storage of its own: libc would write its caller's `errno`.

use crate::abi::*;
use std::os::fd::RawFd;

const PAGE: u64 = 4096;

/// The lowest address that the kernel lets be mapped and copied to by default. Hecaton's own
/// processes have nothing there.
pub const NOWHERE: u64 = 1 << 16;

/// A kernel error number.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Errno(pub i32);

impl From<Errno> for std::io::Error {
    fn from(errno: Errno) -> Self {
        std::io::Error::from_raw_os_error(errno.0)
    }
}

/// A system call with up to six arguments; never touches `errno`.
///
/// # Safety
/// As the call that `number` names.
#[inline]
pub unsafe fn syscall(number: libc::c_long, args: [usize; 6]) -> Result<usize, Errno> {
    let result: isize;
    #[cfg(target_arch = "x86_64")]
    // SAFETY: the kernel's calling convention; rcx and r11 are the only registers it clobbers.
    unsafe {
        std::arch::asm!(
            "syscall",
            inlateout("rax") number as isize => result,
            in("rdi") args[0], in("rsi") args[1], in("rdx") args[2],
            in("r10") args[3], in("r8") args[4], in("r9") args[5],
            out("rcx") _, out("r11") _,
            options(nostack),
        );
    }
    #[cfg(target_arch = "aarch64")]
    // SAFETY: the kernel's calling convention.
    unsafe {
        std::arch::asm!(
            "svc #0",
            in("x8") number,
            inlateout("x0") args[0] as isize => result,
            in("x1") args[1], in("x2") args[2], in("x3") args[3],
            in("x4") args[4], in("x5") args[5],
            options(nostack),
        );
    }
    if (-4095..0).contains(&result) { Err(Errno(-result as i32)) } else { Ok(result as usize) }
}

fn ioctl<T>(fd: RawFd, request: u64, arg: &mut T) -> Result<usize, Errno> {
    // SAFETY: every caller passes the structure whose size is part of `request`.
    unsafe {
        syscall(
            libc::SYS_ioctl,
            [fd as usize, request as usize, std::ptr::from_mut(arg) as usize, 0, 0, 0],
        )
    }
}

/// A borrowed userfaultfd. Copyable: who owns the descriptor closes it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Uffd(pub RawFd);

/// How far a ranged operation came before it stopped.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Partial {
    /// Bytes done.
    pub done: u64,
    /// Why it went no further; `None` when all was done.
    pub error: Option<Errno>,
}

fn partial(result: Result<usize, Errno>, done: i64, len: u64) -> Partial {
    match result {
        Ok(_) => Partial { done: len, error: None },
        // The kernel leaves the count or a negative error in the same field.
        Err(error) => Partial { done: done.max(0) as u64, error: Some(error) },
    }
}

/// Tries of one page whose folio somebody holds locked for a moment.
const TRIES: usize = 4;

/// Repeats `step`, which is given where to begin, until all is moved or no more can be.
///
/// The kernel's count is a lower bound of the pages moved. If Linux 6.18 retries a page (the
/// program touched it just then), it moves that page and its neighbours without counting them. It
/// then finds the first of them in its new place, and stops: EEXIST. The place was empty, so a page
/// that is there was moved.
fn move_all(len: u64, mut step: impl FnMut(u64) -> Partial) -> u64 {
    let (mut moved, mut failed) = (0, 0);
    while moved < len {
        let Partial { done, error } = step(moved);
        moved += done;
        match error {
            None => {}
            Some(Errno(libc::EEXIST)) => moved += PAGE,
            Some(Errno(libc::EAGAIN)) if done > 0 => {}
            Some(Errno(libc::EAGAIN)) if failed + 1 < TRIES => failed += 1,
            Some(_) => break,
        }
    }
    moved
}

impl Uffd {
    /// Opens a userfaultfd of the calling process, non-blocking and closed on exec: by the system
    /// call, or where that is forbidden through `/dev/userfaultfd`.
    ///
    /// Faults taken inside the kernel (a `read` into an evicted page) are handled too; that is what
    /// needs the privilege.
    pub fn open() -> Result<Uffd, Errno> {
        let flags = (libc::O_CLOEXEC | libc::O_NONBLOCK) as usize;
        // SAFETY: takes flags only.
        let direct = unsafe { syscall(libc::SYS_userfaultfd, [flags, 0, 0, 0, 0, 0]) };
        let refused = match direct {
            Ok(fd) => return Ok(Uffd(fd as RawFd)),
            Err(errno) => errno,
        };
        let path = c"/dev/userfaultfd".as_ptr() as usize;
        let open = libc::O_RDWR | libc::O_CLOEXEC;
        // SAFETY: the path is a C string.
        unsafe {
            let device =
                syscall(libc::SYS_openat, [libc::AT_FDCWD as usize, path, open as usize, 0, 0, 0])
                    .map_err(|_| refused)?;
            let made = Uffd::of_device(device as RawFd);
            let _ = syscall(libc::SYS_close, [device, 0, 0, 0, 0, 0]);
            made
        }
    }

    /// The same, through `/dev/userfaultfd` that somebody else may have opened: it is of the
    /// process that calls this.
    pub fn of_device(device: RawFd) -> Result<Uffd, Errno> {
        let flags = (libc::O_CLOEXEC | libc::O_NONBLOCK) as usize;
        let new = USERFAULTFD_IOC_NEW as usize;
        // SAFETY: the ioctl takes flags, not a pointer.
        let made = unsafe { syscall(libc::SYS_ioctl, [device as usize, new, flags, 0, 0, 0]) };
        made.map(|fd| Uffd(fd as RawFd))
    }

    /// Negotiates; returns the features that the kernel has. Works once for each descriptor, and
    /// asking for a feature that is missing or not permitted fails.
    pub fn api(self, features: u64) -> Result<u64, Errno> {
        let mut arg = UffdioApi { api: UFFD_API, features, ioctls: 0 };
        ioctl(self.0, UFFDIO_API, &mut arg)?;
        Ok(arg.features)
    }

    /// Registers `[start, start + len)` for `mode`.
    pub fn register(self, start: u64, len: u64, mode: u64) -> Result<(), Errno> {
        let mut arg = UffdioRegister { range: UffdioRange { start, len }, mode, ioctls: 0 };
        ioctl(self.0, UFFDIO_REGISTER, &mut arg).map(drop)
    }

    /// Ends the registration of `[start, start + len)`; wakes who waits there.
    pub fn unregister(self, start: u64, len: u64) -> Result<(), Errno> {
        ioctl(self.0, UFFDIO_UNREGISTER, &mut UffdioRange { start, len })?;
        // The kernel wakes before it makes the mappings unregistered, and a fault that holds
        // nothing but its mapping's own lock (Linux 6.8) can begin to wait in between.
        self.wake(start, len)
    }

    /// Maps copies of the pages at `src`; `dst` must be missing. `src` need not be aligned.
    pub fn copy(self, dst: u64, src: *const u8, len: u64, mode: u64) -> Partial {
        let mut arg = UffdioCopy { dst, src: src as u64, len, mode, copy: 0 };
        let result = ioctl(self.0, UFFDIO_COPY, &mut arg);
        partial(result, arg.copy, len)
    }

    /// Maps the zero page; wakes who waits.
    pub fn zero(self, start: u64, len: u64) -> Partial {
        let mut arg = UffdioZeropage { range: UffdioRange { start, len }, mode: 0, zeropage: 0 };
        let result = ioctl(self.0, UFFDIO_ZEROPAGE, &mut arg);
        partial(result, arg.zeropage, len)
    }

    /// Write-protects the pages that are present.
    pub fn protect(self, start: u64, len: u64) -> Result<(), Errno> {
        let range = UffdioRange { start, len };
        let mut arg = UffdioWriteprotect { range, mode: UFFDIO_WRITEPROTECT_MODE_WP };
        ioctl(self.0, UFFDIO_WRITEPROTECT, &mut arg).map(drop)
    }

    /// Lifts the write protection and wakes who waits.
    pub fn unprotect(self, start: u64, len: u64) -> Result<(), Errno> {
        let mut arg = UffdioWriteprotect { range: UffdioRange { start, len }, mode: 0 };
        ioctl(self.0, UFFDIO_WRITEPROTECT, &mut arg).map(drop)
    }

    /// Whether mappings are being changed, and the event that tells of it has not been read: what
    /// is at an address now is not what the events so far say of it.
    pub fn is_changing(self) -> bool {
        // The kernel looks at this before it looks at the range, and refuses an empty one.
        self.unprotect(0, 0) == Err(Errno(libc::EAGAIN))
    }

    /// Whether the process whose memory it is of has given that up, by its end or by `exec`.
    pub fn has_lost_memory(self) -> bool {
        // The kernel looks for the memory before it copies. Whatever a program has mapped there
        // (Wine's have) stays as it is: nothing can be copied from where this process has nothing.
        self.copy(NOWHERE, NOWHERE as *const u8, PAGE, 0).error == Some(Errno(libc::ESRCH))
    }

    /// Lets the threads that wait for a page in the range fault again.
    pub fn wake(self, start: u64, len: u64) -> Result<(), Errno> {
        let mut arg = UffdioRange { start, len };
        ioctl(self.0, UFFDIO_WAKE, &mut arg).map(drop)
    }

    /// Moves pages within the calling process, taking them away from `src` at one instant each, as
    /// far as it goes: returns how many bytes from the first on are at `dst` now. All of `dst` must
    /// be empty, nobody else may put anything there, and it must be registered with this
    /// descriptor. Goes no further than a page that is not there, or that a fork shares.
    pub fn move_pages(self, dst: u64, src: u64, len: u64) -> u64 {
        let mode = UFFDIO_MOVE_MODE_DONTWAKE;
        move_all(len, |at| self.try_to_move([dst + at, src + at, len - at], mode))
    }

    /// Moves the pages that are present in `len` bytes at `src`, like [`Uffd::move_pages`]. `src`
    /// may have holes. False if a page stays there.
    pub fn move_what_is_there(self, dst: u64, src: u64, len: u64) -> bool {
        let mode = UFFDIO_MOVE_MODE_DONTWAKE | UFFDIO_MOVE_MODE_ALLOW_SRC_HOLES;
        move_all(len, |at| self.try_to_move([dst + at, src + at, len - at], mode)) == len
    }

    fn try_to_move(self, [dst, src, len]: [u64; 3], mode: u64) -> Partial {
        let mut arg = UffdioMove { dst, src, len, mode, moved: 0 };
        let result = ioctl(self.0, UFFDIO_MOVE, &mut arg);
        partial(result, arg.moved, len)
    }

    /// Reads as many messages as there are and fit; none when the queue is empty.
    pub fn read(self, messages: &mut [UffdMsg]) -> Result<usize, Errno> {
        let len = size_of_val(messages);
        // SAFETY: the kernel writes whole messages, at most `len` bytes of them.
        let read = unsafe {
            syscall(libc::SYS_read, [self.0 as usize, messages.as_mut_ptr() as usize, len, 0, 0, 0])
        };
        match read {
            Ok(bytes) => Ok(bytes / size_of::<UffdMsg>()),
            Err(Errno(libc::EAGAIN)) => Ok(0),
            Err(error) => Err(error),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use hecaton_testkit::wait_until;
    use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

    const LEN: usize = 1 << 18;

    #[test]
    fn pages_that_the_kernel_did_not_count_were_moved() {
        let fails = |done, errno| Partial { done: done * PAGE, error: Some(Errno(errno)) };
        // The seventh of eight pages is missing; the first two are counted, the next four are not.
        let mut asked = Vec::new();
        let moved = move_all(8 * PAGE, |at| {
            asked.push(at / PAGE);
            match at / PAGE {
                0 => fails(2, libc::EAGAIN),
                1..6 => fails(0, libc::EEXIST),
                _ => fails(0, libc::ENOENT),
            }
        });
        assert_eq!((moved / PAGE, asked), (6, vec![0, 2, 3, 4, 5, 6]));

        let mut tries = 0;
        let moved = move_all(8 * PAGE, |_| {
            tries += 1;
            fails(0, libc::EAGAIN)
        });
        assert_eq!((moved, tries), (0, TRIES));
        assert_eq!(move_all(8 * PAGE, |_| Partial { done: 8 * PAGE, error: None }), 8 * PAGE);
    }

    /// A page that has gone and is not known to have gone would be lost. Here a thread writes to
    /// pages that were only read before, and another takes the marks of that away, so that the
    /// kernel has to try again now and then: what comes of it is in the comment of [`move_all`].
    #[test]
    fn every_page_that_has_moved_is_told_of() {
        const PAGES: usize = LEN / PAGE as usize;
        let ready = Uffd::open().and_then(|uffd| uffd.api(UFFD_FEATURE_MOVE).map(|_| uffd));
        let Ok(uffd) = ready else {
            println!("skipped: every_page_that_has_moved_is_told_of: the kernel cannot move pages");
            return;
        };
        let (from, to) = (map(), map());
        uffd.register(to as u64, LEN as u64, UFFDIO_REGISTER_MODE_MISSING).unwrap();
        let over = &AtomicBool::new(false);
        let advise = |at: usize, advice| {
            // SAFETY: a mapping of this test's, whose contents nobody reads.
            assert_eq!(unsafe { libc::madvise(at as *mut libc::c_void, LEN, advice) }, 0);
        };
        std::thread::scope(|scope| {
            scope.spawn(move || {
                for page in (0..PAGES).cycle().take_while(|_| !over.load(Relaxed)) {
                    // SAFETY: in the mapping, which other threads only move and advise.
                    unsafe { ((from + page * PAGE as usize) as *mut u8).write_volatile(1) };
                }
            });
            scope.spawn(move || {
                while !over.load(Relaxed) {
                    advise(from, libc::MADV_COLD);
                }
            });
            let mut untold = 0;
            for _ in 0..2_000 {
                for page in 0..PAGES {
                    // SAFETY: as above.
                    unsafe { ((from + page * PAGE as usize) as *const u8).read_volatile() };
                }
                advise(to, libc::MADV_DONTNEED);
                let moved = uffd.move_pages(to as u64, from as u64, LEN as u64) / PAGE;
                let mut is_there = [0u8; PAGES];
                // SAFETY: a byte for each page of the mapping.
                let asked = unsafe { libc::mincore(to as *mut _, LEN, is_there.as_mut_ptr()) };
                assert_eq!(asked, 0);
                untold +=
                    is_there[moved as usize..].iter().filter(|&&there| there & 1 != 0).count();
            }
            over.store(true, Relaxed);
            assert_eq!(untold, 0);
        });
    }

    fn map() -> usize {
        let (protection, flags) =
            (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
        // SAFETY: a new mapping at an address of the kernel's choice.
        let at = unsafe { libc::mmap(std::ptr::null_mut(), LEN, protection, flags, -1, 0) };
        assert_ne!(at, libc::MAP_FAILED);
        at as usize
    }

    #[test]
    fn a_move_is_a_change_until_it_has_been_read_of() {
        let Ok(uffd) = Uffd::open() else {
            println!("skipped: a_move_is_a_change_until_it_has_been_read_of: no userfaultfd here");
            return;
        };
        uffd.api(UFFD_FEATURE_EVENT_REMAP).unwrap();
        let (from, to) = (map(), map());
        uffd.register(from as u64, LEN as u64, UFFDIO_REGISTER_MODE_MISSING).unwrap();
        assert!(!uffd.is_changing());
        let mover = std::thread::spawn(move || {
            let flags = libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED;
            // SAFETY: both are mappings of this test's.
            let at = unsafe {
                libc::mremap(from as *mut libc::c_void, LEN, LEN, flags, to as *mut libc::c_void)
            };
            assert_eq!(at as usize, to);
        });
        wait_until("the kernel tells of the change", || uffd.is_changing());
        // It waits for the event to be read, however long that takes.
        assert!(uffd.is_changing() && !mover.is_finished());
        let mut messages = [UffdMsg::default(); 4];
        wait_until("the kernel reports the move", || uffd.read(&mut messages).unwrap_or(0) > 0);
        assert_eq!(messages[0].event, UFFD_EVENT_REMAP);
        mover.join().unwrap();
        assert!(!uffd.is_changing());
    }
}
