//! A monitor, through the `vhost` crate's other half, and its guest's driver, on real volumes.

use super::Memory;
use super::chain::{Chain, MAX_DESCRIPTORS};
use super::config::{FEATURES, FLUSH, MAX_RANGE_SECTORS, PROTOCOL_FEATURES, features};
use super::device::serve;
use super::inflight::{Journal, Region};
use super::request::Status;
use crate::Volume;
use crate::attach::Role;
use crate::volume::tests::World;
use proptest::prelude::*;
use std::fs::File;
use std::io::{Read as _, Write as _};
use std::os::fd::{AsRawFd as _, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::atomic::Ordering::{Acquire, Release};
use std::sync::{Arc, LazyLock};
use std::thread::JoinHandle;
use vhost::vhost_user::message::{
    VhostUserConfigFlags, VhostUserHeaderFlag, VhostUserInflight, VhostUserProtocolFeatures,
};
use vhost::vhost_user::{Frontend, VhostUserFrontend as _};
use vhost::{VhostBackend as _, VhostUserMemoryRegionInfo, VringConfigData};
use virtio_bindings::{virtio_blk as blk, virtio_ring as ring};
use virtio_queue::desc::split::Descriptor;
use vm_memory::{Bytes as _, FileOffset, GuestAddress, GuestMemoryBackend as _};
use vmm_sys_util::eventfd::EventFd;

const DESCRIPTORS: u16 = 16;
const QUEUES: usize = 2;

/// The guest's memory: two regions with nothing between them, queues in the first one.
const REGION_BYTES: u64 = 1 << 20;
const SECOND_REGION: u64 = 4 << 20;

/// Where the driver has its buffers: so much for each request.
const BUFFERS: u64 = 0x20000;
const BUFFER_BYTES: u64 = 0x8000;

const NEXT: u16 = ring::VRING_DESC_F_NEXT as u16;
const WRITE: u16 = ring::VRING_DESC_F_WRITE as u16;
const INDIRECT: u16 = ring::VRING_DESC_F_INDIRECT as u16;

fn guest_memory() -> Memory {
    let region = |at: u64| {
        let flags = rustix::fs::MemfdFlags::CLOEXEC;
        let file = File::from(rustix::fs::memfd_create("guest", flags).unwrap());
        file.set_len(REGION_BYTES).unwrap();
        (GuestAddress(at), REGION_BYTES as usize, Some(FileOffset::new(file, 0)))
    };
    Memory::from_ranges_with_files([region(0), region(SECOND_REGION)]).unwrap()
}

/// A queue, as its driver has it.
struct Driver {
    memory: Memory,
    /// Where its table begins; the rings follow.
    at: u64,
    kick: EventFd,
    call: EventFd,
    available: u16,
    used: u16,
}

impl Driver {
    fn table(&self) -> u64 {
        self.at
    }

    fn ring(&self) -> u64 {
        self.at + 0x1000
    }

    fn used_ring(&self) -> u64 {
        self.at + 0x2000
    }

    fn describe(&self, table: u64, index: u16, descriptor: Descriptor) {
        let at = GuestAddress(table + u64::from(index) * 16);
        self.memory.write_obj(descriptor, at).unwrap();
    }

    /// Makes a request available that begins with this descriptor.
    fn offer(&mut self, head: u16) {
        let at = self.ring() + 4 + 2 * u64::from(self.available % DESCRIPTORS);
        self.memory.store(head, GuestAddress(at), Release).unwrap();
        self.available = self.available.wrapping_add(1);
        self.memory.store(self.available, GuestAddress(self.ring() + 2), Release).unwrap();
    }

    fn used_index(&self) -> u16 {
        self.memory.load(GuestAddress(self.used_ring() + 2), Acquire).unwrap()
    }

    /// Waits for the device's answers, and returns their heads and lengths.
    fn finished(&mut self, count: u16) -> Vec<(u32, u32)> {
        let until = self.used.wrapping_add(count);
        hecaton_testkit::wait_until("the guest is answered", || self.used_index() == until);
        let answer = |at: u16| {
            let at = self.used_ring() + 4 + 8 * u64::from(at % DESCRIPTORS);
            let word = |at| self.memory.read_obj::<u32>(GuestAddress(at)).unwrap();
            (word(at), word(at + 4))
        };
        let answers = (0..count).map(|at| answer(self.used.wrapping_add(at))).collect();
        self.used = until;
        answers
    }

    /// Puts a request together: its head, what is to be written, room for what is to be read, and
    /// the status; in the buffers of this number. With `indirect`, in a table of its own.
    fn compose(&self, number: u16, head: [u8; 16], data: &[u8], room: u32, indirect: bool) {
        let buffer = BUFFERS + u64::from(number) * BUFFER_BYTES;
        let mut said = head.to_vec();
        said.extend_from_slice(data);
        self.memory.write_slice(&said, GuestAddress(buffer)).unwrap();
        let answer = buffer + said.len() as u64;
        self.memory.write_slice(&vec![0xee; room as usize + 1], GuestAddress(answer)).unwrap();
        // A head that is split in two, and room that is not aligned to anything.
        let pieces =
            [(buffer, 5, 0), (buffer + 5, said.len() as u32 - 5, 0), (answer, room + 1, WRITE)];
        let table = if indirect { buffer + BUFFER_BYTES - 64 } else { self.table() };
        let first = if indirect { 0 } else { number * 4 };
        for (at, (address, bytes, flags)) in pieces.into_iter().enumerate() {
            let at = first + at as u16;
            let more = if at - first < 2 { NEXT } else { 0 };
            self.describe(table, at, Descriptor::new(address, bytes, flags | more, at + 1));
        }
        if indirect {
            self.describe(self.table(), number * 4, Descriptor::new(table, 48, INDIRECT, 0));
        }
    }

    /// Does one request, and returns its status and what was read.
    fn request(&mut self, head: [u8; 16], data: &[u8], room: u32, indirect: bool) -> (u8, Vec<u8>) {
        self.compose(0, head, data, room, indirect);
        self.offer(0);
        self.kick.write(1).unwrap();
        assert_eq!(self.finished(1), [(0, room + 1)]);
        let mut answer = vec![0; room as usize + 1];
        let at = BUFFERS + 16 + data.len() as u64;
        self.memory.read_slice(&mut answer, GuestAddress(at)).unwrap();
        let status = answer.pop().unwrap();
        (status, answer)
    }
}

fn head(kind: u32, sector: u64) -> [u8; 16] {
    let mut head = [0; 16];
    head[..4].copy_from_slice(&kind.to_le_bytes());
    head[8..].copy_from_slice(&sector.to_le_bytes());
    head
}

fn range(sector: u64, sectors: u32, flags: u32) -> Vec<u8> {
    let mut range = sector.to_le_bytes().to_vec();
    range.extend(sectors.to_le_bytes());
    range.extend(flags.to_le_bytes());
    range
}

/// A monitor with a device that is served in this process.
struct Machine {
    drivers: Vec<Driver>,
    frontend: Frontend,
    device: JoinHandle<()>,
}

impl Machine {
    /// Sets all queues up, and has the device resume what is in `inflight`, if there is anything.
    fn start(volume: Arc<Volume>, memory: Memory, inflight: Option<&Region>) -> Machine {
        Machine::with(volume, Role::Writer, FEATURES, memory, inflight)
    }

    /// The guest accepts the offered features that are in `wanted`.
    fn with(
        volume: Arc<Volume>,
        role: Role,
        wanted: u64,
        memory: Memory,
        inflight: Option<&Region>,
    ) -> Machine {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let theirs = File::from(OwnedFd::from(theirs));
        let device = std::thread::spawn(move || serve(volume, role, &theirs));
        let mut frontend = Frontend::from_stream(ours, QUEUES as u64);
        frontend.set_owner().unwrap();
        let offered = frontend.get_features().unwrap();
        assert_eq!(offered, features(role));
        assert_eq!(frontend.get_protocol_features().unwrap(), PROTOCOL_FEATURES);
        frontend.set_protocol_features(PROTOCOL_FEATURES).unwrap();
        frontend.set_hdr_flags(VhostUserHeaderFlag::NEED_REPLY);
        let without_event_index = !(1 << ring::VIRTIO_RING_F_EVENT_IDX);
        frontend.set_features(offered & wanted & without_event_index).unwrap();
        let regions: Vec<_> = memory
            .iter()
            .map(|region| VhostUserMemoryRegionInfo::from_guest_region(region).unwrap())
            .collect();
        frontend.set_mem_table(&regions).unwrap();
        let wanted = VhostUserInflight::new(0, 0, QUEUES as u16, DESCRIPTORS);
        let (kept, file) = match inflight {
            Some(region) => {
                let kept = VhostUserInflight::new(region.bytes(), 0, QUEUES as u16, DESCRIPTORS);
                (kept, File::from(region.try_clone_fd().unwrap()))
            }
            None => frontend.get_inflight_fd(&wanted).unwrap(),
        };
        frontend.set_inflight_fd(&kept, file.as_raw_fd()).unwrap();
        let drivers: Vec<Driver> = (0..QUEUES)
            .map(|queue| Driver {
                memory: memory.clone(),
                at: queue as u64 * 0x4000,
                kick: EventFd::new(0).unwrap(),
                call: EventFd::new(0).unwrap(),
                available: 0,
                used: 0,
            })
            .collect();
        for (queue, driver) in drivers.iter().enumerate() {
            frontend.set_vring_num(queue, DESCRIPTORS).unwrap();
            frontend.set_vring_base(queue, 0).unwrap();
            let host = |at: u64| memory.get_host_address(GuestAddress(at)).unwrap() as u64;
            let config = VringConfigData {
                queue_max_size: DESCRIPTORS,
                queue_size: DESCRIPTORS,
                flags: 0,
                desc_table_addr: host(driver.table()),
                avail_ring_addr: host(driver.ring()),
                used_ring_addr: host(driver.used_ring()),
                log_addr: None,
            };
            frontend.set_vring_addr(queue, &config).unwrap();
            frontend.set_vring_kick(queue, &driver.kick).unwrap();
            frontend.set_vring_call(queue, &driver.call).unwrap();
            frontend.set_vring_enable(queue, true).unwrap();
        }
        Machine { drivers, frontend, device }
    }

    fn end(self) {
        drop(self.frontend);
        self.device.join().unwrap();
    }
}

#[test]
fn a_driver_finds_what_it_has_written() {
    let world = World::new(2, 2, 1024);
    let mut machine = Machine::start(world.volume(), guest_memory(), None);
    let space = machine.frontend.get_config(0, 60, VhostUserConfigFlags::empty(), &[0; 60]);
    assert_eq!(space.unwrap().1[..8], (1024u64 * 8).to_le_bytes());
    let data: Vec<u8> = (0..8704u32).map(|at| (at % 251) as u8).collect();
    for (queue, indirect) in [(0, false), (1, true)] {
        let driver = &mut machine.drivers[queue];
        // Not where pages begin or end.
        let sector = 3 + queue as u64 * 64;
        let (status, _) = driver.request(head(1, sector), &data, 0, indirect);
        assert_eq!(status, Status::Done as u8);
        let (status, read) = driver.request(head(0, sector), &[], 8704, indirect);
        assert!(status == Status::Done as u8 && read == data);
        let (status, id) = driver.request(head(blk::VIRTIO_BLK_T_GET_ID, 0), &[], 20, indirect);
        assert!(status == Status::Done as u8 && id.starts_with(b"disk\0"));
        assert_eq!(driver.request(head(4, 0), &[], 0, indirect).0, Status::Done as u8);
        // Discarded in two ranges, of which only the second one has whole pages.
        let ranges = [range(sector, 1, 0), range(sector + 5, 8, 0)].concat();
        assert_eq!(driver.request(head(11, 0), &ranges, 0, indirect).0, Status::Done as u8);
        let zeros = range(sector + 16, 1, 1);
        assert_eq!(driver.request(head(13, 0), &zeros, 0, indirect).0, Status::Done as u8);
        let mut expected = data.clone();
        expected[5 * 512..13 * 512].fill(0);
        expected[16 * 512..].fill(0);
        let (status, read) = driver.request(head(0, sector), &[], 8704, indirect);
        assert!(status == Status::Done as u8 && read == expected);
    }
    machine.end();
}

/// Requests in flight together end independently, also when a donor goes in the middle of it.
#[test]
fn short_requests_are_under_way_together() {
    const ROUNDS: u32 = 60;
    let mut world = World::new(2, 2, 1024);
    let mut machine = Machine::start(world.volume(), guest_memory(), None);
    let driver = &mut machine.drivers[0];
    let page = |number: u16, round: u32| [number as u8 ^ round as u8; 4096];
    for round in 0..ROUNDS {
        // Pages 0 and 1 are written and 2 and 3 read, then the other way round.
        let is_write = |number: u16| u32::from(number) / 2 == round % 2;
        for number in 0..4 {
            let sector = u64::from(number) * 8;
            match is_write(number) {
                true => driver.compose(number, head(1, sector), &page(number, round), 0, false),
                false => driver.compose(number, head(0, sector), &[], 4096, false),
            }
            driver.offer(number * 4);
        }
        driver.kick.write(1).unwrap();
        if round == ROUNDS / 2 {
            world.stop(1);
        }
        let mut heads: Vec<u32> = driver.finished(4).into_iter().map(|(head, _)| head).collect();
        heads.sort_unstable();
        assert_eq!(heads, [0, 4, 8, 12]);
        for number in 0..4 {
            let mut answer = vec![0; if is_write(number) { 1 } else { 4097 }];
            let said = if is_write(number) { 16 + 4096 } else { 16 };
            let at = BUFFERS + u64::from(number) * BUFFER_BYTES + said;
            driver.memory.read_slice(&mut answer, GuestAddress(at)).unwrap();
            assert_eq!(answer.pop(), Some(Status::Done as u8), "{number} in round {round}");
            let written = round.checked_sub(1).map_or([0; 4096], |before| page(number, before));
            assert!(answer.is_empty() || answer == written, "{number} in round {round}");
        }
    }
    machine.end();
}

#[test]
fn who_may_only_read_is_told_so_and_changes_nothing() {
    let world = World::new(1, 1, 1024);
    let volume = world.volume();
    volume.write(0, &[7; 8192]).unwrap();
    let reader =
        |wanted| Machine::with(Arc::clone(&volume), Role::Reader, wanted, guest_memory(), None);
    // The second one has not listened.
    let mut machines = [reader(!0), reader(FEATURES)];
    for machine in &mut machines {
        let offered = machine.frontend.get_features().unwrap();
        assert_ne!(offered & 1 << blk::VIRTIO_BLK_F_RO, 0);
        assert_eq!(offered & 1 << blk::VIRTIO_BLK_F_DISCARD, 0);
        let driver = &mut machine.drivers[0];
        for (kind, data) in [(1, vec![9; 512]), (11, range(0, 8, 0)), (13, range(0, 8, 1))] {
            let (status, _) = driver.request(head(kind, 0), &data, 0, false);
            assert_eq!(status, Status::Failed as u8, "{kind}");
        }
        assert_eq!(driver.request(head(4, 0), &[], 0, false).0, Status::Done as u8);
        let (status, read) = driver.request(head(0, 0), &[], 8192, false);
        assert!(status == Status::Done as u8 && read == [7; 8192]);
    }
    machines.into_iter().for_each(Machine::end);
}

/// A buffered write is answered even if donors have no room for it. A guest that cannot flush would
/// never learn of that.
#[test]
fn who_cannot_flush_is_answered_when_donors_have_it() {
    let world = World::full().buffering(64 << 10);
    let volume = world.volume();
    let start =
        |wanted| Machine::with(Arc::clone(&volume), Role::Writer, wanted, guest_memory(), None);
    let mut machine = start(!FLUSH);
    let driver = &mut machine.drivers[0];
    // Parts of pages, too.
    let done = Status::Done as u8;
    assert_eq!(driver.request(head(1, 3), &[1; 4096], 0, false).0, done);
    assert_eq!(driver.request(head(13, 9), &range(9, 3, 1), 0, false).0, done);
    assert_eq!(volume.stats(0).buffered_bytes, 0);
    let beyond = World::FIRST_WITHOUT_ROOM / 512;
    let refused = [(1, vec![2; 4096]), (13, range(beyond, 8, 0))];
    for (kind, data) in &refused {
        let (status, _) = driver.request(head(*kind, beyond), data, 0, false);
        assert_eq!(status, Status::Failed as u8, "{kind}");
    }
    machine.end();
    let mut machine = start(!0);
    let driver = &mut machine.drivers[0];
    assert_eq!(driver.request(head(1, beyond), &[2; 4096], 0, false).0, done);
    assert_eq!(driver.request(head(4, 0), &[], 0, false).0, Status::Failed as u8);
    machine.end();
    volume.release().unwrap();
}

#[test]
fn what_cannot_be_is_answered_and_does_no_harm() {
    let world = World::new(1, 1, 1024);
    let mut machine = Machine::start(world.volume(), guest_memory(), None);
    let driver = &mut machine.drivers[0];
    let failed = Status::Failed as u8;
    for (kind, sector, data, room) in [
        (0, 8191, 0, 1024),
        (0, u64::MAX, 0, 512),
        (0, 0, 0, 100),
        (1, 8192, 512, 0),
        (1, 0, 100, 0),
        (11, 0, 15, 0),
        (11, 0, 0, 0),
    ] {
        let data = vec![1; data];
        assert_eq!(driver.request(head(kind, sector), &data, room, false).0, failed, "{kind}");
    }
    let beyond = [range(0, 8, 0), range(8190, 8, 0)].concat();
    assert_eq!(driver.request(head(11, 0), &beyond, 0, false).0, failed);
    let long = range(0, MAX_RANGE_SECTORS + 1, 0);
    assert_eq!(driver.request(head(13, 0), &long, 0, false).0, failed);
    for (kind, flags) in [(11, 1), (13, 2), (77, 0)] {
        let unsupported = Status::Unsupported as u8;
        let data = range(0, 8, flags);
        assert_eq!(driver.request(head(kind, 0), &data, 0, false).0, unsupported);
    }
    // Nowhere to say anything, a circle, a table within a table: given back as they are.
    let buffer = GuestAddress(BUFFERS).0;
    driver.describe(driver.table(), 0, Descriptor::new(buffer, 16, 0, 0));
    driver.describe(driver.table(), 1, Descriptor::new(buffer, 16, NEXT, 1));
    driver.describe(driver.table(), 2, Descriptor::new(buffer + 64, 16, INDIRECT, 0));
    driver.describe(buffer + 64, 0, Descriptor::new(buffer, 16, INDIRECT, 0));
    for head in 0..3 {
        driver.offer(head);
        driver.kick.write(1).unwrap();
        assert_eq!(driver.finished(1), [(u32::from(head), 0)]);
    }
    let (status, read) = driver.request(head(0, 0), &[], 512, false);
    assert!(status == Status::Done as u8 && read == [0; 512]);
    machine.end();
}

/// As after a kill: of four requests that were taken, the second one is finished.
#[test]
fn what_a_predecessor_had_under_way_is_done_and_nothing_twice() {
    let world = World::new(1, 1, 1024);
    let volume = world.volume();
    let memory = guest_memory();
    let region = Arc::new(Region::create(QUEUES as u16, DESCRIPTORS).unwrap());
    let mut journal = Journal::open(Arc::clone(&region), 0, DESCRIPTORS).unwrap();
    journal.resume(0, 0);
    let mut killed = Driver {
        memory: memory.clone(),
        at: 0,
        kick: EventFd::new(0).unwrap(),
        call: EventFd::new(0).unwrap(),
        available: 0,
        used: 0,
    };
    for number in 0..4 {
        killed.compose(number, head(1, u64::from(number) * 8), &[number as u8 + 1; 4096], 0, false);
        killed.offer(number * 4);
        if number < 3 {
            journal.begin(number * 4);
        }
    }
    // The guest has seen that one, and what it wrote has changed since.
    journal.finishing(4);
    memory.write_obj(4u32, GuestAddress(killed.used_ring() + 4)).unwrap();
    memory.store(1u16, GuestAddress(killed.used_ring() + 2), Release).unwrap();
    volume.write(4096, &[9; 4096]).unwrap();
    let mut machine = Machine::start(Arc::clone(&volume), memory, Some(&region));
    let driver = &mut machine.drivers[0];
    (driver.available, driver.used) = (4, 1);
    let mut heads: Vec<u32> = driver.finished(3).into_iter().map(|(head, _)| head).collect();
    heads.sort_unstable();
    assert_eq!(heads, [0, 8, 12]);
    // The guest is told at once, as its last call may be lost.
    assert!(driver.call.read().unwrap() >= 1);
    let mut pages = vec![0; 4 * 4096];
    volume.read(0, &mut pages).unwrap();
    for (page, byte) in pages.chunks(4096).zip([1, 9, 3, 4]) {
        assert!(page.iter().all(|found| *found == byte), "{byte}: {}", page[0]);
    }
    // Stopped and started by the monitor, it goes on where it was.
    assert_eq!(machine.frontend.get_vring_base(0).unwrap(), 4);
    let driver = &machine.drivers[0];
    machine.frontend.set_vring_base(0, 4).unwrap();
    machine.frontend.set_vring_kick(0, &driver.kick).unwrap();
    let driver = &mut machine.drivers[0];
    assert_eq!(driver.request(head(4, 0), &[], 0, false).0, Status::Done as u8);
    machine.end();
}

#[test]
fn a_monitor_that_wants_what_is_not_there_is_refused() {
    let world = World::new(1, 1, 1024);
    let refused = |what: &str, ask: &dyn Fn(&mut Frontend) -> bool| {
        let mut machine = Machine::start(world.volume(), guest_memory(), None);
        assert!(!ask(&mut machine.frontend), "{what}");
        machine.end();
    };
    refused("features", &|monitor| monitor.set_features(1 << 60).is_ok());
    refused("a long queue", &|monitor| monitor.set_vring_num(0, MAX_DESCRIPTORS + 1).is_ok());
    refused("a queue of no power of two", &|monitor| monitor.set_vring_num(0, 12).is_ok());
    refused("requests in flight of many queues", &|monitor| {
        monitor.get_inflight_fd(&VhostUserInflight::new(0, 0, 100, 16)).is_ok()
    });
    refused("memory that is no journal", &|monitor| {
        let file = File::open("/dev/zero").unwrap();
        let kept = VhostUserInflight::new(4096, 0, 2, DESCRIPTORS);
        monitor.set_inflight_fd(&kept, file.as_raw_fd()).is_ok()
    });
    refused("a log of dirty pages", &|monitor| {
        monitor.set_protocol_features(VhostUserProtocolFeatures::LOG_SHMFD).is_ok()
            && monitor.get_config(0, 60, VhostUserConfigFlags::empty(), &[0; 60]).is_ok()
    });
}

/// A monitor is told of another size once it runs, and again when it has come back.
#[test]
fn a_monitor_learns_of_another_size() {
    let world = World::new(1, 1, 1024);
    let volume = world.volume();
    let mut machine = Machine::start(Arc::clone(&volume), guest_memory(), None);
    let sectors = |machine: &mut Machine| {
        let space = machine.frontend.get_config(0, 60, VhostUserConfigFlags::empty(), &[0; 60]);
        u64::from_le_bytes(space.unwrap().1[..8].try_into().unwrap())
    };
    let (mut told, theirs) = UnixStream::pair().unwrap();
    let mut is_told = || {
        let mut message = [0; 12];
        told.set_nonblocking(true).unwrap();
        match told.read(&mut message) {
            Ok(12) => message == [2, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0],
            Ok(_) => panic!("{message:?}"),
            Err(error) => {
                assert_eq!(error.kind(), std::io::ErrorKind::WouldBlock);
                false
            }
        }
    };
    // It runs, and nobody knows what it has read.
    machine.frontend.set_backend_request_fd(&theirs).unwrap();
    assert!(is_told() && !is_told());
    assert_eq!(sectors(&mut machine), 1024 * 8);
    assert!(!is_told());
    volume.resize(2048).unwrap();
    assert!(is_told() && !is_told());
    volume.resize(2048).unwrap();
    assert!(!is_told(), "the same size");
    assert_eq!(sectors(&mut machine), 2048 * 8);
    let driver = &mut machine.drivers[0];
    assert_eq!(driver.request(head(1, 1500 * 8), &[3; 4096], 0, false).0, Status::Done as u8);

    // Not while it does not run.
    for queue in 0..QUEUES {
        machine.frontend.get_vring_base(queue).unwrap();
    }
    volume.resize(1600).unwrap();
    assert!(!is_told());
    let driver = &machine.drivers[0];
    machine.frontend.set_vring_base(0, driver.available).unwrap();
    machine.frontend.set_vring_kick(0, &driver.kick).unwrap();
    assert!(is_told() && !is_told());
    let driver = &mut machine.drivers[0];
    let beyond = driver.request(head(1, 1599 * 8 + 1), &[3; 4096], 0, false);
    assert_eq!(beyond.0, Status::Failed as u8);
    let (status, read) = driver.request(head(0, 1500 * 8), &[], 4096, false);
    assert!(status == Status::Done as u8 && read == [3; 4096]);

    // It has gone: nobody is told.
    machine.end();
    volume.resize(1700).unwrap();
    assert!(!is_told());
}

/// An address within the guest's memory, at its edges, or anywhere.
fn address() -> impl Strategy<Value = u64> {
    prop_oneof![
        6 => 0..REGION_BYTES,
        2 => (REGION_BYTES - 64)..REGION_BYTES + 64,
        2 => SECOND_REGION - 64..SECOND_REGION + 64,
        1 => any::<u64>(),
        1 => u64::MAX - 64..=u64::MAX,
    ]
}

fn descriptor() -> impl Strategy<Value = Descriptor> {
    let bytes = prop_oneof![
        6 => 0u32..600, 2 => (0u32..40).prop_map(|count| count * 16), 1 => any::<u32>(),
        1 => Just(u32::MAX),
    ];
    let flags = prop_oneof![8 => 0u16..4, 2 => 4u16..8, 1 => any::<u16>()];
    let next = prop_oneof![8 => 0u16..DESCRIPTORS, 1 => any::<u16>()];
    (address(), bytes, flags, next)
        .prop_map(|(address, bytes, flags, next)| Descriptor::new(address, bytes, flags, next))
}

/// A volume for hostile guests, whose bytes are not checked.
static HOSTILE: LazyLock<(World, Arc<Volume>)> = LazyLock::new(|| {
    let world = World::new(1, 1, 1024);
    let volume = world.volume();
    (world, volume)
});

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    /// Whatever is in a guest's memory, chains end, and their buffers are within it.
    #[test]
    fn chains_stay_in_the_guests_memory(
        noise in prop::collection::vec(descriptor(), 64), head: u16, entries in 1u16..=64,
    ) {
        let memory = guest_memory();
        // Everywhere, so that indirect tables are made of them too.
        for at in (0..REGION_BYTES).step_by(1024) {
            for (index, descriptor) in noise.iter().enumerate() {
                memory.write_obj(*descriptor, GuestAddress(at + 16 * index as u64)).unwrap();
            }
        }
        if let Ok(chain) = Chain::read(&memory, GuestAddress(0), entries, head % 64) {
            let bytes = [chain.readable.bytes(), chain.writable.bytes()];
            prop_assert!(bytes.iter().sum::<u64>() > 0);
            for (buffers, bytes) in [&chain.readable, &chain.writable].into_iter().zip(bytes) {
                let mut all = vec![0; bytes as usize];
                prop_assert!(buffers.load(&memory, 0, &mut all).is_ok());
                prop_assert!(buffers.store(&memory, 0, &all).is_ok());
                prop_assert!(buffers.load(&memory, 1, &mut all).is_err() || bytes == 0);
            }
        }
    }

    /// Whatever a monitor sends, its connection ends at the latest with it, and nothing panics.
    #[test]
    fn any_message_ends_its_connection_at_most(
        messages in prop::collection::vec(
            (
                prop_oneof![8 => 1u32..46, 1 => any::<u32>()],
                prop_oneof![4 => Just(1u32), 2 => Just(9u32), 1 => any::<u32>()],
                prop_oneof![
                    4 => prop::collection::vec(prop_oneof![3 => Just(0u8), 1 => any::<u8>()], 0..48),
                    1 => prop::collection::vec(any::<u8>(), 0..300),
                ],
                prop_oneof![12 => Just(None), 1 => any::<u32>().prop_map(Some)],
            ),
            1..12,
        ),
    ) {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let theirs = File::from(OwnedFd::from(theirs));
        let volume = Arc::clone(&HOSTILE.1);
        let device = std::thread::spawn(move || serve(volume, Role::Writer, &theirs));
        for (code, flags, payload, length) in messages {
            let length = length.unwrap_or(payload.len() as u32);
            let mut message = [code, flags, length].map(u32::to_ne_bytes).concat();
            message.extend(payload);
            // Fails once it is closed. Answers are few enough to wait in the socket.
            if (&ours).write_all(&message).is_err() {
                break;
            }
        }
        drop(ours);
        prop_assert!(device.join().is_ok());
    }

    /// Whatever a guest has in a queue, the device answers or gives the queue up, and serves the
    /// other one.
    #[test]
    fn a_hostile_queue_spoils_itself_at_most(
        noise in prop::collection::vec(descriptor(), 16),
        heads in prop::collection::vec(0u16..=DESCRIPTORS, 1..20),
        kind in prop_oneof![0u32..2, 8u32..14, any::<u32>()],
        index in prop_oneof![4 => Just(None), 1 => any::<u16>().prop_map(Some)],
    ) {
        let mut machine = Machine::start(Arc::clone(&HOSTILE.1), guest_memory(), None);
        let other = &mut machine.drivers[1];
        prop_assert_eq!(other.request(head(4, 0), &[], 0, false).0, Status::Done as u8);
        let mut rings = [0; 0x4000];
        other.memory.read_slice(&mut rings, GuestAddress(other.at)).unwrap();
        let driver = &mut machine.drivers[0];
        for at in (BUFFERS..REGION_BYTES).step_by(512) {
            driver.memory.write_slice(&head(kind, 1), GuestAddress(at)).unwrap();
        }
        for (index, descriptor) in noise.iter().enumerate() {
            driver.describe(driver.table(), index as u16, *descriptor);
        }
        for head in &heads {
            driver.offer(*head);
        }
        if let Some(index) = index {
            driver.memory.store(index, GuestAddress(driver.ring() + 2), Release).unwrap();
        }
        driver.kick.write(1).unwrap();
        // Waits for what was taken. Answers may have been written into the other one's rings.
        machine.frontend.get_vring_base(0).unwrap();
        let other = &mut machine.drivers[1];
        other.memory.write_slice(&rings, GuestAddress(other.at)).unwrap();
        prop_assert_eq!(other.request(head(4, 0), &[], 0, false).0, Status::Done as u8);
        machine.end();
    }
}
