//! A hypervisor as far as its memory goes: a process of its own with a memory file mapped shared,
//! which it hands over as `libhecaton.so` does, and threads that use it as vCPUs and devices would.
//!
//! It does what it is told on standard input, a line each, and answers with a line. A word of
//! memory that is not what was last written there ends it with a message.

use hecaton_uffd::abi::{
    GUEST_RAM_FEATURES, UFFDIO_REGISTER_MODE_MISSING, UFFDIO_REGISTER_MODE_WP,
};
use hecaton_uffd::guest_ram::{Answer, Handover, MAGIC};
use hecaton_uffd::handover::Range;
use hecaton_uffd::{Errno, Uffd};
use std::io::{BufRead as _, IoSlice, IoSliceMut};
use std::os::fd::{AsFd as _, AsRawFd as _, BorrowedFd, FromRawFd as _, OwnedFd};
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

pub(crate) const PAGE: usize = 4096;
const WORDS: usize = PAGE / 8;
/// Words of each page that one thread writes; so all threads write to all pages.
const SLICE: usize = WORDS / THREADS;
pub(crate) const THREADS: usize = 8;

/// A connection to the pager, and what was handed over on it.
pub(crate) struct Client {
    socket: OwnedFd,
    pub(crate) uffd: OwnedFd,
}

impl Client {
    pub(crate) fn connect(socket: &Path) -> Client {
        use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
        let (family, kind) = (AddressFamily::UNIX, SocketType::SEQPACKET);
        let fd = rustix::net::socket_with(family, kind, SocketFlags::CLOEXEC, None).unwrap();
        rustix::net::connect(&fd, &SocketAddrUnix::new(socket).unwrap()).unwrap();
        let uffd = Uffd::open().unwrap();
        uffd.api(GUEST_RAM_FEATURES).unwrap();
        // SAFETY: just opened.
        Client { socket: fd, uffd: unsafe { OwnedFd::from_raw_fd(uffd.0) } }
    }

    pub(crate) fn register(&self, at: u64, len: u64) -> Result<(), Errno> {
        let mode = UFFDIO_REGISTER_MODE_MISSING | UFFDIO_REGISTER_MODE_WP;
        Uffd(self.uffd.as_raw_fd()).register(at, len, mode)
    }

    /// Sends bytes and descriptors as they are; returns the reason of a refusal, or that the pager
    /// has hung up.
    pub(crate) fn say(&self, bytes: &[u8], fds: &[BorrowedFd<'_>]) -> Result<(), String> {
        use rustix::net::{
            RecvAncillaryBuffer, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags,
        };
        let mut space = [std::mem::MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(8))];
        let mut rights = SendAncillaryBuffer::new(&mut space);
        if !fds.is_empty() {
            assert!(rights.push(SendAncillaryMessage::ScmRights(fds)));
        }
        let flags = SendFlags::NOSIGNAL;
        let parts = [IoSlice::new(bytes)];
        rustix::net::sendmsg(&self.socket, &parts, &mut rights, flags)
            .map_err(|error| error.to_string())?;
        let mut answer = [0u8; size_of::<Answer>()];
        let mut parts = [IoSliceMut::new(&mut answer)];
        let none = &mut RecvAncillaryBuffer::default();
        let read = rustix::net::recvmsg(&self.socket, &mut parts, none, RecvFlags::empty());
        match Answer::parse(&answer[..read.map_or(0, |read| read.bytes)]) {
            None => Err("hung up".into()),
            Some(answer) if answer.refused == 0 => Ok(()),
            Some(answer) => Err(String::from_utf8(answer.reason().to_vec()).unwrap()),
        }
    }

    pub(crate) fn hand_over(
        &self,
        first: bool,
        region: Range,
        file: &OwnedFd,
    ) -> Result<(), String> {
        let message = Handover { magic: MAGIC, first: first.into(), region, offset: 0 };
        let both = [self.uffd.as_fd(), file.as_fd()];
        self.say(message.as_bytes(), if first { &both } else { &both[1..] })
    }
}

/// A memory file, mapped.
pub(crate) struct Memory {
    pub(crate) file: OwnedFd,
    pub(crate) start: *mut u8,
    pub(crate) len: usize,
}

impl Memory {
    pub(crate) fn new(pages: usize) -> Memory {
        use rustix::mm::{MapFlags, ProtFlags};
        let flags = rustix::fs::MemfdFlags::CLOEXEC;
        let file = rustix::fs::memfd_create("hecaton-ram-test", flags).unwrap();
        let len = pages * PAGE;
        rustix::fs::ftruncate(&file, len as u64).unwrap();
        let prot = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new mapping at a place of the kernel's choice.
        let start = unsafe {
            rustix::mm::mmap(std::ptr::null_mut(), len, prot, MapFlags::SHARED, &file, 0).unwrap()
        };
        Memory { file, start: start.cast(), len }
    }

    pub(crate) fn range(&self) -> Range {
        Range { start: self.start as u64, len: self.len as u64 }
    }

    fn pages(&self) -> usize {
        self.len / PAGE
    }

    fn words(&self) -> &[AtomicU64] {
        // SAFETY: mapped as long as this lives; atomics, because all threads use all pages.
        unsafe { std::slice::from_raw_parts(self.start.cast(), self.len / 8) }
    }

    /// As hypervisors free guest RAM: out of the file, then out of the mapping.
    fn free(&self, first: usize, pages: usize) {
        let flags = rustix::fs::FallocateFlags::PUNCH_HOLE | rustix::fs::FallocateFlags::KEEP_SIZE;
        let (at, len) = ((first * PAGE) as u64, (pages * PAGE) as u64);
        rustix::fs::fallocate(&self.file, flags, at, len).unwrap();
        self.let_go(first, pages);
    }

    /// Out of the mapping only.
    fn let_go(&self, first: usize, pages: usize) {
        assert!(first + pages <= self.pages());
        // SAFETY: within the mapping; the file keeps what is in it.
        let done = unsafe {
            libc::madvise(self.start.add(first * PAGE).cast(), pages * PAGE, libc::MADV_DONTNEED)
        };
        assert_eq!(done, 0);
    }
}

fn value(page: usize, thread: usize, generation: u32) -> u64 {
    if generation == 0 {
        return 0;
    }
    let mut word = (page as u64) << 40 | (thread as u64) << 32 | u64::from(generation);
    word = (word ^ (word >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    word ^ (word >> 27)
}

/// One thread's record of its words.
#[derive(Clone)]
struct Owner {
    thread: usize,
    /// Number of this thread's writes to each page.
    generations: Vec<u32>,
    random: u64,
    /// Writes as a device's thread would: the kernel copies to the guest.
    pattern: Option<std::sync::Arc<OwnedFd>>,
}

impl Owner {
    fn new(thread: usize, pages: usize) -> Owner {
        let flags = rustix::fs::MemfdFlags::CLOEXEC;
        let pattern = (thread == 0).then(|| rustix::fs::memfd_create("pattern", flags).unwrap());
        Owner {
            thread,
            generations: vec![0; pages],
            random: thread as u64 * 77 + 1,
            pattern: pattern.map(std::sync::Arc::new),
        }
    }

    fn below(&mut self, end: usize) -> usize {
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        (self.random % end as u64) as usize
    }

    fn slice<'a>(&self, memory: &'a Memory, page: usize) -> &'a [AtomicU64] {
        &memory.words()[page * WORDS + self.thread * SLICE..][..SLICE]
    }

    fn check(&self, memory: &Memory, page: usize) {
        let expected = value(page, self.thread, self.generations[page]);
        for (at, word) in self.slice(memory, page).iter().enumerate() {
            let found = word.load(Relaxed);
            assert!(
                found == expected,
                "thread {}: word {at} of page {page} is {found:x} instead of {expected:x} \
                 (write {})",
                self.thread,
                self.generations[page]
            );
        }
    }

    fn write(&mut self, memory: &Memory, page: usize) {
        self.generations[page] += 1;
        let value = value(page, self.thread, self.generations[page]);
        let slice = self.slice(memory, page);
        match &self.pattern {
            None => slice.iter().for_each(|word| word.store(value, Relaxed)),
            Some(pattern) => {
                let bytes: Vec<u8> = value.to_ne_bytes().repeat(SLICE);
                rustix::io::pwrite(pattern.as_fd(), &bytes, 0).unwrap();
                let to = slice.as_ptr() as *mut libc::c_void;
                // SAFETY: the words are this thread's.
                let read = unsafe { libc::pread(pattern.as_raw_fd(), to, bytes.len(), 0) };
                assert_eq!(read, bytes.len() as isize);
            }
        }
    }

    fn work(&mut self, memory: &Memory, rounds: usize) {
        let pages = memory.pages();
        let mut page = self.below(pages);
        for round in 0..rounds {
            // Runs of neighbours and jumps, so that windows are prefetched and wasted.
            page = if round % 9 < 6 { (page + 1) % pages } else { self.below(pages) };
            self.check(memory, page);
            if round % 3 != 0 {
                self.write(memory, page);
            }
        }
    }
}

struct Machine {
    client: Client,
    memory: Memory,
    owners: Vec<Owner>,
    plugged: Option<(Memory, Vec<Owner>)>,
}

/// SAFETY wrapper: raw pointers in [`Memory`] are to memory that is shared on purpose.
struct Shared<'a>(&'a Memory);
// SAFETY: all access goes through atomics and system calls.
unsafe impl Sync for Shared<'_> {}
// SAFETY: as above.
unsafe impl Send for Shared<'_> {}

impl Shared<'_> {
    fn memory(&self) -> &Memory {
        self.0
    }
}

fn hammer(memory: &Memory, owners: &mut [Owner], rounds: usize) {
    let shared = Shared(memory);
    std::thread::scope(|scope| {
        for owner in owners {
            let shared = &shared;
            scope.spawn(move || owner.work(shared.memory(), rounds));
        }
    });
}

fn owners(pages: usize) -> Vec<Owner> {
    (0..THREADS).map(|thread| Owner::new(thread, pages)).collect()
}

impl Machine {
    fn numbers(words: &[&str]) -> Vec<usize> {
        words.iter().map(|word| word.parse().unwrap()).collect()
    }

    fn obey(&mut self, line: &str) {
        let words: Vec<&str> = line.split_whitespace().collect();
        let numbers = Machine::numbers(&words[1..]);
        match (words[0], &numbers[..]) {
            ("hammer", &[rounds]) => hammer(&self.memory, &mut self.owners, rounds),
            ("fill", &[]) => {
                for page in 0..self.memory.pages() {
                    self.owners.iter_mut().for_each(|owner| owner.write(&self.memory, page));
                }
            }
            ("check", &[]) => {
                for page in 0..self.memory.pages() {
                    self.owners.iter().for_each(|owner| owner.check(&self.memory, page));
                }
            }
            ("free", &[first, pages]) => {
                self.memory.free(first, pages);
                for owner in &mut self.owners {
                    owner.generations[first..first + pages].fill(0);
                }
            }
            ("let_go", &[first, pages]) => self.memory.let_go(first, pages),
            // Frees and uses pages over and over, while others use the rest.
            ("balloon", &[rounds]) => {
                let pages = self.memory.pages();
                let (mut one, others) = (self.owners[1].clone(), &mut self.owners[2..]);
                // Only the first sixteenth is ballooned, and only one thread uses that.
                let ballooned = pages / 16;
                let shared = Shared(&self.memory);
                std::thread::scope(|scope| {
                    for owner in others {
                        let shared = &shared;
                        scope.spawn(move || {
                            for _ in 0..rounds {
                                let page = ballooned + owner.below(pages - ballooned);
                                owner.check(shared.memory(), page);
                                owner.write(shared.memory(), page);
                            }
                        });
                    }
                    for _ in 0..rounds / 4 {
                        let (first, count) = (one.below(ballooned - 8), 1 + one.below(8));
                        shared.memory().free(first, count);
                        for page in first..first + count {
                            one.generations[page] = 0;
                            one.check(shared.memory(), page);
                            one.write(shared.memory(), page);
                        }
                    }
                    (0..ballooned).for_each(|page| one.check(shared.memory(), page));
                });
                self.owners[1] = one;
            }
            ("plug", &[pages]) => {
                let memory = Memory::new(pages);
                let Range { start, len } = memory.range();
                self.client.register(start, len).unwrap();
                self.client.hand_over(false, memory.range(), &memory.file).unwrap();
                // Said again, as after a pager's death.
                self.client.hand_over(false, memory.range(), &memory.file).unwrap();
                self.plugged = Some((memory, owners(pages)));
            }
            ("hammer_plugged", &[rounds]) => {
                let (memory, owners) = self.plugged.as_mut().expect("plugged before");
                hammer(memory, owners, rounds);
            }
            ("unplug", &[]) => {
                let (memory, _) = self.plugged.take().expect("plugged before");
                // SAFETY: nobody uses it any more.
                unsafe { rustix::mm::munmap(memory.start.cast(), memory.len).unwrap() };
            }
            _ => panic!("the test says {line}"),
        }
    }
}

/// Plays the machine until the end of standard input.
pub(crate) fn run(socket: &Path, pages: usize) {
    let client = Client::connect(socket);
    let memory = Memory::new(pages);
    let Range { start, len } = memory.range();
    client.register(start, len).unwrap();
    client.hand_over(true, memory.range(), &memory.file).unwrap();
    let mut machine = Machine { client, memory, owners: owners(pages), plugged: None };
    println!("done");
    for line in std::io::stdin().lock().lines() {
        machine.obey(&line.unwrap());
        println!("done");
    }
}
