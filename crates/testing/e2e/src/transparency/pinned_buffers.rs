//! Has the kernel read and write memory past the page table while other memory pushes it out.
//!
//! `pinned-buffers HOW FILE PAGES`, where HOW is `registered` (buffers of io_uring), `direct`
//! (O_DIRECT, many requests in flight) or `spliced` (vmsplice). FILE is written first, then read
//! and compared.

use hecaton_e2e::{Checked, Random, number_argument};
use io_uring::{IoUring, opcode, types};
use std::fs::{File, OpenOptions};
use std::io::{Read as _, Write as _};
use std::os::fd::AsRawFd as _;
use std::os::unix::fs::{FileExt as _, OpenOptionsExt as _};
use std::path::Path;

const PAGE: usize = 4096;

/// The file, and the buffer that it is read to.
const LEN: usize = 16 << 20;

/// One request.
const PART: usize = 64 << 10;

const ROUNDS: u64 = 2;

fn main() {
    let how = std::env::args().nth(1).expect("HOW is missing");
    let path = std::env::args().nth(2).expect("FILE is missing");
    let mut others = Checked::new(1, number_argument(3));
    match how.as_str() {
        "registered" => registered(Path::new(&path), &mut others),
        "direct" => direct(Path::new(&path), &mut others),
        "spliced" => spliced(&mut others),
        _ => panic!("HOW is none of registered, direct, spliced: {how}"),
    }
    others.verify_all();
    println!("verified");
}

/// Memory of its own, as an allocator has it from the kernel.
fn map(len: usize) -> &'static mut [u8] {
    let (protection, flags) =
        (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
    // SAFETY: a new mapping at an address of the kernel's choice, which stays for good.
    unsafe {
        let at = libc::mmap(std::ptr::null_mut(), len, protection, flags, -1, 0);
        assert_ne!(at, libc::MAP_FAILED, "{}", std::io::Error::last_os_error());
        std::slice::from_raw_parts_mut(at.cast(), len)
    }
}

/// Each page with a content of its own, another in each round.
fn fill(bytes: &mut [u8], round: u64) {
    for (number, page) in bytes.chunks_exact_mut(PAGE).enumerate() {
        let mut random = Random(round << 32 | number as u64);
        page.as_chunks_mut::<8>().0.iter_mut().for_each(|word| *word = random.next().to_le_bytes());
    }
}

fn expect(bytes: &[u8], round: u64, what: &str) {
    let mut right = vec![0; bytes.len()];
    fill(&mut right, round);
    let wrong = bytes.chunks(PAGE).zip(right.chunks(PAGE)).filter(|(a, b)| a != b).count();
    assert!(wrong == 0, "{what}, round {round}: {wrong} of {} pages are wrong", bytes.len() / PAGE);
}

fn push_out(others: &mut Checked) {
    (0..others.pages()).for_each(|page| others.write(page));
}

fn registered(path: &Path, others: &mut Checked) {
    let file = OpenOptions::new().read(true).write(true).create(true).truncate(true).open(path);
    let file = file.expect("the file can be made");
    let buffer = map(LEN);
    let mut ring = IoUring::new(64).expect("the kernel has io_uring");
    let whole = libc::iovec { iov_base: buffer.as_mut_ptr().cast(), iov_len: LEN };
    // SAFETY: the buffer stays for good.
    unsafe { ring.submitter().register_buffers(&[whole]) }.expect("the buffer can be registered");
    let fd = types::Fd(file.as_raw_fd());
    for round in 0..ROUNDS {
        let mut contents = vec![0; LEN];
        fill(&mut contents, round);
        file.write_all_at(&contents, 0).expect("the file can be written");
        push_out(others);
        for at in (0..LEN).step_by(PART) {
            let to = buffer[at..].as_mut_ptr();
            let read = opcode::ReadFixed::new(fd, to, PART as u32, 0).offset(at as u64);
            complete(&mut ring, &read.build());
        }
        expect(buffer, round, "read to a registered buffer");

        fill(buffer, !round);
        push_out(others);
        for at in (0..LEN).step_by(PART) {
            let from = buffer[at..].as_ptr();
            let write = opcode::WriteFixed::new(fd, from, PART as u32, 0).offset(at as u64);
            complete(&mut ring, &write.build());
        }
        file.read_exact_at(&mut contents, 0).expect("the file can be read");
        expect(&contents, !round, "written from a registered buffer");
    }
}

fn complete(ring: &mut IoUring, request: &io_uring::squeue::Entry) {
    // SAFETY: the request's buffer and descriptor outlive it: it is waited for.
    unsafe { ring.submission().push(request) }.expect("there is room for one");
    ring.submit_and_wait(1).expect("the kernel takes the request");
    let done = ring.completion().next().expect("one has ended").result();
    assert_eq!(done, PART as i32, "{}", std::io::Error::from_raw_os_error(-done));
}

/// Requests in flight at once.
const IN_FLIGHT: usize = 32;

fn direct(path: &Path, others: &mut Checked) {
    let mut contents = vec![0; LEN];
    fill(&mut contents, 0);
    File::create(path).and_then(|mut file| file.write_all(&contents)).expect("the file is written");
    let file = OpenOptions::new().read(true).custom_flags(libc::O_DIRECT).open(path);
    let file = file.expect("the file system has direct I/O");
    let buffer = map(LEN);
    let mut ring = IoUring::new(IN_FLIGHT as u32).expect("the kernel has io_uring");
    let fd = types::Fd(file.as_raw_fd());
    for round in 0..ROUNDS {
        buffer.fill(round as u8);
        let mut next = 0;
        while next < LEN {
            for _ in 0..IN_FLIGHT {
                let read = opcode::Read::new(fd, buffer[next..].as_mut_ptr(), PART as u32);
                // SAFETY: the buffer outlives the request, which is waited for.
                unsafe { ring.submission().push(&read.offset(next as u64).build()) }
                    .expect("as many as there is room for");
                next += PART;
            }
            ring.submit().expect("the kernel takes the requests");
            // The buffer's pages are the oldest by now: they are evicted first.
            let first = next / PART * 100;
            (first..first + 2_000).for_each(|page| others.write(page % others.pages()));
            ring.submit_and_wait(IN_FLIGHT).expect("the kernel ends the requests");
            for done in ring.completion() {
                assert_eq!(done.result(), PART as i32);
            }
        }
        expect(buffer, 0, "read directly");
    }
}

fn spliced(others: &mut Checked) {
    let buffer = map(PART);
    let (mut reader, writer) = std::io::pipe().expect("a pipe");
    for round in 0..ROUNDS * 4 {
        fill(buffer, round);
        let part = libc::iovec { iov_base: buffer.as_mut_ptr().cast(), iov_len: PART };
        // SAFETY: the buffer is not written to before it was read.
        let given = unsafe { libc::vmsplice(writer.as_raw_fd(), &raw const part, 1, 0) };
        assert_eq!(given, PART as isize, "{}", std::io::Error::last_os_error());
        push_out(others);
        let mut read = vec![0; PART];
        reader.read_exact(&mut read).expect("what was given");
        expect(&read, round, "spliced");
        expect(buffer, round, "the buffer that was spliced");
    }
}
