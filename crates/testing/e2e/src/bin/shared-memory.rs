//! Shares memory between processes: anonymous mappings, memory files and names.
//!
//! Each memory is larger than the local limit. Wrong pages are counted, and printed.

use hecaton_e2e::{PAGE_WORDS, fork_and, wait_for};
use std::ffi::CString;
use std::fs::File;
use std::io::{Error, Read as _};
use std::os::fd::{AsRawFd as _, FromRawFd as _};
use std::os::unix::fs::FileExt as _;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

const PAGE: usize = 4096;

/// Pages of each shared memory: 62.5 MiB.
const PAGES: usize = 16_000;

/// Child processes that write at the same time.
const CHILDREN: usize = 3;

fn map(bytes: usize, flags: i32, fd: i32, offset: i64) -> *mut u64 {
    let protection = libc::PROT_READ | libc::PROT_WRITE;
    // SAFETY: a new mapping at an address of the kernel's choice.
    let at = unsafe { libc::mmap(std::ptr::null_mut(), bytes, protection, flags, fd, offset) };
    assert_ne!(at, libc::MAP_FAILED, "{}", Error::last_os_error());
    at.cast()
}

fn map_file(file: &File) -> *mut u64 {
    map(PAGES * PAGE, libc::MAP_SHARED, file.as_raw_fd(), 0)
}

/// The address of word `at` of a page.
fn word(memory: *mut u64, page: usize, at: usize) -> *mut u64 {
    memory.wrapping_add(page * PAGE_WORDS + at)
}

/// The word that a writer puts into a page.
fn value(page: usize, writer: usize) -> u64 {
    (page as u64 + 1).wrapping_mul(0x9E37_79B9_7F4A_7C15) ^ writer as u64
}

fn write(memory: *mut u64, pages: impl Iterator<Item = usize>, writer: usize) {
    for page in pages {
        write_word(memory, page, writer, writer);
    }
}

fn write_word(memory: *mut u64, page: usize, at: usize, writer: usize) {
    // SAFETY: within the mapping.
    unsafe { word(memory, page, at).write_volatile(value(page, writer)) };
}

/// Number of pages whose word of `writer` has another value than it wrote.
fn wrong(memory: *mut u64, pages: impl Iterator<Item = usize>, writer: usize) -> usize {
    // SAFETY: within the mapping.
    let read = |page| unsafe { word(memory, page, writer).read_volatile() };
    pages.filter(|&page| read(page) != value(page, writer)).count()
}

fn report(what: &str, wrong: usize) {
    println!("{what}: {wrong} of {PAGES} pages are wrong");
}

/// Parent and children write to the same pages at the same time, each to its own word.
fn by_all(memory: *mut u64) {
    write(memory, 0..PAGES, 0);
    let children: Vec<_> = (1..=CHILDREN)
        .map(|writer| {
            fork_and(|| {
                assert_eq!(wrong(memory, 0..PAGES, 0), 0, "the parent's are not seen");
                write(memory, 0..PAGES, writer);
                write(memory, (0..PAGES).rev(), writer);
            })
        })
        .collect();
    write(memory, 0..PAGES, CHILDREN + 1);
    children.into_iter().for_each(wait_for);
    for writer in 0..=CHILDREN + 1 {
        report(&format!("writer {writer}"), wrong(memory, 0..PAGES, writer));
    }
}

/// Children write and the parent checks, round after round, until standard input ends.
fn rounds() {
    let has_ended = Arc::new(AtomicBool::new(false));
    let ended = Arc::clone(&has_ended);
    std::thread::spawn(move || {
        let _ = std::io::stdin().read_to_end(&mut Vec::new());
        ended.store(true, Relaxed);
    });
    let memory = map(PAGES * PAGE, libc::MAP_SHARED | libc::MAP_ANONYMOUS, -1, 0);
    let mut all_wrong = 0;
    let mut salt = 0;
    while !has_ended.load(Relaxed) {
        salt += CHILDREN + 1;
        let writers = salt..salt + CHILDREN;
        // Word `at` of a page has what this round's writer puts there.
        let children: Vec<_> = writers
            .clone()
            .map(|writer| {
                fork_and(|| {
                    (0..PAGES).for_each(|page| write_word(memory, page, writer - salt, writer))
                })
            })
            .collect();
        children.into_iter().for_each(wait_for);
        for writer in writers {
            let is_wrong = |&page: &usize| {
                // SAFETY: within the mapping.
                let read = unsafe { word(memory, page, writer - salt).read_volatile() };
                read != value(page, writer)
            };
            all_wrong += (0..PAGES).filter(is_wrong).count();
        }
    }
    println!("{all_wrong} pages were wrong");
}

fn anonymous() {
    by_all(map(PAGES * PAGE, libc::MAP_SHARED | libc::MAP_ANONYMOUS, -1, 0));
    // A small mapping, which stays local.
    let small = map(PAGE, libc::MAP_SHARED | libc::MAP_ANONYMOUS, -1, 0);
    wait_for(fork_and(|| write(small, 0..1, 1)));
    println!("small: {}", wrong(small, 0..1, 1));
}

fn make_memory_file(past_libc: bool) -> File {
    let name = c"some name";
    // SAFETY: a C string.
    let fd = unsafe {
        match past_libc {
            true => libc::syscall(libc::SYS_memfd_create, name.as_ptr(), libc::MFD_CLOEXEC) as i32,
            false => libc::memfd_create(name.as_ptr(), libc::MFD_CLOEXEC),
        }
    };
    assert!(fd >= 0, "{}", Error::last_os_error());
    // SAFETY: just made.
    unsafe { File::from_raw_fd(fd) }
}

fn kind_of(file: &File) -> String {
    // SAFETY: the kernel fills in both structures.
    unsafe {
        let mut status: libc::stat = std::mem::zeroed();
        let mut system: libc::statfs = std::mem::zeroed();
        assert_eq!(libc::fstat(file.as_raw_fd(), &raw mut status), 0);
        assert_eq!(libc::fstatfs(file.as_raw_fd(), &raw mut system), 0);
        let (mode, links) = (status.st_mode, status.st_nlink);
        let size = status.st_size;
        format!("mode {mode:o}, {links} links, {size} bytes, file system {:x}", system.f_type)
    }
}

fn memory_file() {
    let file = make_memory_file(false);
    println!("{}", kind_of(&file));
    file.set_len((PAGES * PAGE) as u64).unwrap();
    println!("{}", kind_of(&file));
    let memory = map_file(&file);
    by_all(memory);
    // Two mappings of one file, and `read` and `write` on it.
    let view = map_file(&file);
    write(view, 0..PAGES, 9);
    report("the other view", wrong(memory, 0..PAGES, 9));
    let mut bytes = vec![0u8; PAGE];
    let mut differ = 0;
    for page in 0..PAGES {
        file.read_exact_at(&mut bytes, (page * PAGE) as u64).unwrap();
        differ += usize::from(bytes[72..80] != value(page, 9).to_ne_bytes());
    }
    report("read", differ);
    for page in 0..PAGES {
        let at = (page * PAGE + 80) as u64;
        file.write_all_at(&value(page, 10).to_ne_bytes(), at).unwrap();
    }
    report("write", wrong(memory, 0..PAGES, 10));
    report("beside what was written", wrong(memory, 0..PAGES, 9));
    // Holes: one of whole pages, and one within a page.
    let hole = |offset: usize, bytes: usize| {
        let mode = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
        let (offset, bytes) = (offset as i64, bytes as i64);
        // SAFETY: numbers only.
        assert_eq!(unsafe { libc::fallocate(file.as_raw_fd(), mode, offset, bytes) }, 0);
    };
    hole(100 * PAGE, 5000 * PAGE);
    hole(7000 * PAGE + 76, 8);
    let is_zero = |page: &usize| {
        // SAFETY: within the mapping.
        (0..PAGE_WORDS).all(|at| unsafe { word(memory, *page, at).read_volatile() } == 0)
    };
    println!("in the hole: {} pages of zeros", (100..5100).filter(is_zero).count());
    // SAFETY: within the mapping.
    println!("at its edge: {:?}", [9, 10].map(|at| unsafe { *word(memory, 7000, at) } != 0));
    report("around the hole", wrong(memory, (0..100).chain(5100..7000).chain(7001..PAGES), 9));
    // Truncate within a page, and grow again.
    file.set_len((6000 * PAGE + 74) as u64).unwrap();
    file.set_len((PAGES * PAGE) as u64).unwrap();
    let bytes = value(6000, 9).to_ne_bytes();
    // SAFETY: within the mapping.
    let left = unsafe { word(memory, 6000, 9).read_volatile() }.to_ne_bytes();
    println!("cut: {:?}", left[..2] == bytes[..2] && left[2..] == [0; 6]);
    println!("behind it: {} pages of zeros", (6001..PAGES).filter(is_zero).count());
    report("before it", wrong(memory, (0..100).chain(5100..6000), 9));
    let other = make_memory_file(true);
    other.set_len((PAGES * PAGE) as u64).unwrap();
    let memory = map_file(&other);
    write(memory, 0..PAGES, 1);
    report("by a bare system call", wrong(memory, 0..PAGES, 1));
    drop((file, other));
    report("without the file", wrong(memory, 0..PAGES, 1));
}

fn open_named(name: &CString, flags: i32) -> Result<File, Error> {
    // SAFETY: a C string.
    let fd = unsafe { libc::shm_open(name.as_ptr(), flags, 0o600) };
    // SAFETY: just opened.
    if fd < 0 { Err(Error::last_os_error()) } else { Ok(unsafe { File::from_raw_fd(fd) }) }
}

fn named() {
    let name = CString::new(format!("/hecaton-test-{}", std::process::id())).unwrap();
    let create = libc::O_RDWR | libc::O_CREAT | libc::O_EXCL;
    println!("before: {:?}", open_named(&name, libc::O_RDWR).err());
    let file = open_named(&name, create).unwrap();
    println!("again: {:?}", open_named(&name, create).err());
    file.set_len((PAGES * PAGE) as u64).unwrap();
    let memory = map_file(&file);
    write(memory, 0..PAGES, 0);
    let program = std::env::current_exe().unwrap();
    let ended = Command::new(program).arg("other").arg(name.to_str().unwrap()).status().unwrap();
    println!("the other program: {ended}");
    report("of the other program", wrong(memory, 0..PAGES, 1));
    // SAFETY: a C string.
    println!("unlinked: {}", unsafe { libc::shm_unlink(name.as_ptr()) });
    println!("after: {:?}", open_named(&name, libc::O_RDWR).err());
    report("without a name", wrong(memory, 0..PAGES, 0));
}

/// Runs as another program, which has only the name.
fn other(name: &str) {
    let file = open_named(&CString::new(name).unwrap(), libc::O_RDWR).unwrap();
    let memory = map_file(&file);
    assert_eq!(wrong(memory, 0..PAGES, 0), 0, "what the first program wrote is not seen");
    write(memory, 0..PAGES, 1);
}

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    match arguments.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        ["anonymous"] => anonymous(),
        ["memory-file"] => memory_file(),
        ["rounds"] => rounds(),
        ["named"] => named(),
        ["other", name] => other(name),
        _ => panic!("anonymous, memory-file, rounds or named"),
    }
}
