//! A process that hands its memory over as Firecracker does, byte for byte, when it restores a
//! snapshot; and what is not quite so.

use crate::machine::PAGE;
use crate::world::{Machine, World};
use hecaton_pager::Guest;
use hecaton_testkit::wait_until;
use hecaton_uffd::Uffd;
use hecaton_uffd::abi::{UFFD_FEATURE_EVENT_REMOVE, UFFDIO_REGISTER_MODE_MISSING};
use std::io::{BufRead as _, IoSlice, Write as _};
use std::os::fd::{AsFd as _, BorrowedFd, FromRawFd as _, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};

/// 64 MiB in two regions, and an image in which they stand in the other order.
const PAGES: usize = 16 << 10;
const FIRST: usize = PAGES / 4;

/// Word of a page. In the image, with `written` 0, one page in five is zero.
fn image_word(page: usize, written: u64) -> u64 {
    match (page % 5, written) {
        (0, 0) => 0,
        _ => (page as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ written,
    }
}

fn write_image(path: &Path) {
    let mut file = std::io::BufWriter::new(std::fs::File::create(path).unwrap());
    for page in 0..PAGES {
        file.write_all(&image_word(page, 0).to_ne_bytes().repeat(PAGE / 8)).unwrap();
    }
    file.flush().unwrap();
}

/// As `vmm_sys_util`'s `send_with_fd`, which Firecracker uses.
fn send(stream: &UnixStream, bytes: &[u8], fds: &[BorrowedFd<'_>]) {
    use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags};
    let mut space = [std::mem::MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(4))];
    let mut rights = SendAncillaryBuffer::new(&mut space);
    if !fds.is_empty() {
        assert!(rights.push(SendAncillaryMessage::ScmRights(fds)));
    }
    let flags = SendFlags::NOSIGNAL;
    rustix::net::sendmsg(stream, &[IoSlice::new(bytes)], &mut rights, flags).unwrap();
}

fn open_uffd() -> OwnedFd {
    let uffd = Uffd::open().unwrap();
    uffd.api(UFFD_FEATURE_EVENT_REMOVE).unwrap();
    // SAFETY: just opened.
    unsafe { OwnedFd::from_raw_fd(uffd.0) }
}

struct Guarded {
    start: *mut u8,
    /// Last value written to each page: 0 for the image's contents, `None` for freed.
    written: Vec<Option<u64>>,
}

impl Guarded {
    fn word(&self, page: usize, at: usize) -> *mut u64 {
        // SAFETY: within the mapping.
        unsafe { self.start.cast::<u64>().add(page * PAGE / 8 + at) }
    }

    fn check(&self, page: usize) {
        // The first region's contents come last in the image.
        let in_image = (page + PAGES - FIRST) % PAGES;
        let expected = self.written[page].map_or(0, |written| image_word(in_image, written));
        for at in [0, PAGE / 16, PAGE / 8 - 1] {
            // SAFETY: mapped.
            let found = unsafe { self.word(page, at).read_volatile() };
            assert!(found == expected, "page {page} has {found:x} instead of {expected:x}");
        }
    }

    fn write(&mut self, page: usize, written: u64) {
        let in_image = (page + PAGES - FIRST) % PAGES;
        let value = image_word(in_image, written);
        // SAFETY: mapped.
        (0..PAGE / 8).for_each(|at| unsafe { self.word(page, at).write_volatile(value) });
        self.written[page] = Some(written);
    }
}

/// Plays Firecracker until the end of standard input.
pub(crate) fn run(socket: &Path) {
    use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous};
    let prot = ProtFlags::READ | ProtFlags::WRITE;
    let len = PAGES * PAGE;
    // SAFETY: a new mapping.
    let start =
        unsafe { mmap_anonymous(std::ptr::null_mut(), len, prot, MapFlags::PRIVATE).unwrap() };
    let uffd = open_uffd();
    let raw = Uffd(std::os::fd::AsRawFd::as_raw_fd(&uffd));
    raw.register(start as u64, len as u64, UFFDIO_REGISTER_MODE_MISSING).unwrap();
    let stream = UnixStream::connect(socket).unwrap();
    let (base, first, rest) = (start as u64, FIRST * PAGE, (PAGES - FIRST) * PAGE);
    let message = format!(
        "[{{\"base_host_virt_addr\":{base},\"size\":{first},\"offset\":{rest},\
         \"page_size\":4096,\"page_size_kib\":4096}},\
         {{\"base_host_virt_addr\":{},\"size\":{rest},\"offset\":0,\
         \"page_size\":4096,\"page_size_kib\":4096}}]",
        base + first as u64
    );
    send(&stream, message.as_bytes(), &[uffd.as_fd()]);
    // Firecracker keeps the connection, and the userfaultfd, as long as it lives.
    let mut memory = Guarded { start: start.cast(), written: vec![Some(0); PAGES] };
    println!("done");
    for line in std::io::stdin().lock().lines() {
        let line = line.unwrap();
        let words: Vec<&str> = line.split_whitespace().collect();
        match words[..] {
            ["check"] => (0..PAGES).for_each(|page| memory.check(page)),
            ["use", times] => {
                for i in 0..times.parse::<usize>().unwrap() {
                    let page = i * 7919 % PAGES;
                    memory.check(page);
                    if i % 2 == 0 {
                        memory.write(page, i as u64);
                    }
                }
            }
            ["inflate", first, count] => {
                let (first, count): (usize, usize) =
                    (first.parse().unwrap(), count.parse().unwrap());
                // SAFETY: within the mapping.
                let done = unsafe {
                    let at = memory.start.add(first * PAGE).cast();
                    libc::madvise(at, count * PAGE, libc::MADV_DONTNEED)
                };
                assert_eq!(done, 0);
                memory.written[first..first + count].fill(None);
            }
            _ => panic!("the test says {line}"),
        }
        println!("done");
    }
    drop((stream, uffd));
}

fn world_with_image() -> (World, PathBuf) {
    let mut socket = PathBuf::new();
    let world = World::with_guest(|dir| {
        socket = dir.join("firecracker.sock");
        let image = dir.join("memory");
        write_image(&image);
        Guest::Firecracker { socket: socket.clone(), image }
    });
    (world, socket)
}

pub(crate) fn a_snapshot_is_restored_from_the_pool() {
    let (world, socket) = world_with_image();
    // While the image is loaded, perhaps.
    world.kill_pager();
    let mut machine = Machine::spawn(&["be-firecracker", socket.to_str().unwrap()]);
    machine.begin("use 6000");
    wait_until("the machine uses its memory", || world.stats().pages_in > 0);
    world.kill_pager();
    machine.wait();
    machine.order("inflate 1000 3000");
    machine.order("check");
    machine.order("use 20000");
    let stats = world.stats();
    world.kill_pager();
    machine.order("check");
    assert!(stats.limit_is_advisory, "{stats:?}");
    assert_eq!(stats.guest_ram_bytes, (PAGES * PAGE) as u64);
    assert!(stats.pages_in > 0 && stats.pages_discarded > 2000, "{stats:?}");
    let refused = world.say("{\"evict\":{\"down_to_bytes\":0}}");
    assert!(refused.contains("nothing can be taken away"), "{refused}");
    machine.end();
    world.end();
}

pub(crate) fn malformed_handovers_harm_nobody() {
    let (world, socket) = world_with_image();
    let uffd = open_uffd();
    let connect = || UnixStream::connect(&socket).unwrap();
    let wrong: [(&str, usize); 6] = [
        ("[]", 1),
        ("{\"base\":1}", 1),
        ("[{\"base_host_virt_addr\":4096000,\"size\":4096,\"offset\":0}]", 0),
        ("[{\"base_host_virt_addr\":4096000,\"size\":4096,\"offset\":0}]", 2),
        ("[{\"base_host_virt_addr\":4096000,\"size\":4096,\"offset\":0,\"page_size\":2097152}]", 1),
        ("[{\"base_host_virt_addr\":4096000,\"size\":4096,\"offset\":8192000000}]", 1),
    ];
    for (message, descriptors) in wrong {
        send(&connect(), message.as_bytes(), &vec![uffd.as_fd(); descriptors]);
    }
    let no_uffd = std::fs::File::open("/dev/null").unwrap();
    let good = "[{\"base_host_virt_addr\":4096000,\"size\":4096,\"offset\":0}]";
    send(&connect(), good.as_bytes(), &[no_uffd.as_fd()]);
    // Half a message, and then nothing; and a peer that never says anything.
    send(&connect(), &good.as_bytes()[..20], &[uffd.as_fd()]);
    drop(connect());
    let silent = connect();
    wait_until("all are refused", || world.stats().handovers_refused >= 9);

    let mut machine = Machine::spawn(&["be-firecracker", socket.to_str().unwrap()]);
    machine.order("check");
    // A second one, while the first lives; and one after it: the image is its own.
    send(&connect(), good.as_bytes(), &[uffd.as_fd()]);
    wait_until("it is refused", || world.stats().handovers_refused >= 10);
    machine.order("use 1000");
    machine.end();
    wait_until("its end is noticed", || world.stats().processes == 0);
    send(&connect(), good.as_bytes(), &[uffd.as_fd()]);
    wait_until("it is refused too", || world.stats().handovers_refused >= 11);
    drop(silent);
    world.end();
}
