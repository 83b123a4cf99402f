//! The client of drives over vhost-user: a machine monitor and its guest's driver in one, with one
//! queue. fio's is built with a library that few systems have, and so both servers are asked by
//! this one.
//!
//! As in a guest, requests are described in memory that the server has, too; it is kicked where it
//! wants to be, and its answers are taken until there are none before it is asked to call.

use super::RAMP_S;
use super::fio::{Measured, Workload};
use crate::bench::measure::stats::Latencies;
use crate::bench::world::interrupt;
use crate::bench::world::process::eventually;
use anyhow::{Context as _, ensure};
use hecaton_memory::SplitMix;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use std::fs::File;
use std::os::fd::{AsRawFd as _, BorrowedFd};
use std::path::Path;
use std::sync::atomic::Ordering::{Acquire, Release, SeqCst};
use std::sync::atomic::fence;
use std::time::{Duration, Instant};
use vhost::vhost_user::message::{VhostUserHeaderFlag, VhostUserProtocolFeatures};
use vhost::vhost_user::{Frontend, VhostUserFrontend as _, VhostUserVirtioFeatures};
use vhost::{VhostBackend as _, VhostUserMemoryRegionInfo, VringConfigData};
use virtio_bindings::{virtio_blk as blk, virtio_config, virtio_ring as ring};
use virtio_queue::desc::split::Descriptor;
use vm_memory::{Bytes as _, FileOffset, GuestAddress, GuestMemoryBackend as _, GuestMemoryMmap};
use vmm_sys_util::eventfd::EventFd;

/// Descriptors of the queue; a request has three: head, data and status.
const DESCRIPTORS: u16 = 128;
const PARTS: u16 = 3;

/// Where the table and the rings are, and where the requests begin.
const TABLE: GuestAddress = GuestAddress(0);
const AVAILABLE: GuestAddress = GuestAddress(0x1000);
const USED: GuestAddress = GuestAddress(0x2000);
const REQUESTS: u64 = 0x10000;

/// Head and status of a request are on a page before its data.
const HEAD_BYTES: u32 = 16;
const DATA_AT: u64 = 4096;

/// Between two looks at Ctrl-C.
const TICK: Timespec = Timespec { tv_sec: 0, tv_nsec: 100_000_000 };

/// How long an answer, or a connection, may take.
const PATIENCE: Duration = Duration::from_secs(30);

const SECTOR: u64 = 512;

/// One workload for so many seconds, all over the first `bytes`.
pub(super) fn measure(
    socket: &Path,
    workload: &Workload,
    bytes: u64,
    seconds: u32,
) -> anyhow::Result<Measured> {
    let mut drive = Drive::connect(socket, workload.block_bytes, workload.depth)?;
    let mut places = Places::new(workload, bytes);
    let from = Instant::now() + Duration::from_secs(RAMP_S.into());
    let until = from + Duration::from_secs(seconds.into());
    let mut latencies = Latencies::new();
    let mut answers = 0;
    for slot in 0..workload.depth as u16 {
        drive.ask(slot, places.next(), workload.writes())?;
    }
    let end = loop {
        let slot = drive.answer()?;
        let now = Instant::now();
        if now >= from {
            answers += 1;
            latencies.record(now - drive.asked[usize::from(slot)]);
        }
        if now >= until {
            break now;
        }
        drive.ask(slot, places.next(), workload.writes())?;
    };
    for _ in 1..workload.depth {
        drive.answer()?;
    }
    let percentiles = latencies.percentiles();
    Ok(Measured {
        per_s: f64::from(answers) / (end - from).as_secs_f64(),
        p50_us: percentiles.p50_us,
        p99_us: percentiles.p99_us,
    })
}

/// Writes a block, and reads it back: a server that answers and does nothing is not measured.
pub(super) fn check(socket: &Path) -> anyhow::Result<()> {
    let mut drive = Drive::connect(socket, 4096, 1)?;
    drive.ask(0, 0, true)?;
    drive.answer()?;
    let written = drive.data(0)?;
    drive.memory.write_slice(&[0; 4096], GuestAddress(drive.slot(0) + DATA_AT))?;
    drive.ask(0, 0, false)?;
    drive.answer()?;
    ensure!(drive.data(0)? == written, "the drive gives back something else than was written");
    Ok(())
}

/// Where requests go, in bytes.
struct Places {
    blocks: u64,
    block_bytes: u64,
    /// Generator of random places; `None` for sequential ones, which follow each other.
    random: Option<SplitMix>,
    last: u64,
}

impl Places {
    fn new(workload: &Workload, bytes: u64) -> Self {
        let block_bytes = workload.block_bytes;
        let random = workload.is_random().then(|| SplitMix::new(bytes));
        Self { blocks: bytes / block_bytes, block_bytes, random, last: 0 }
    }

    fn next(&mut self) -> u64 {
        self.last = match &mut self.random {
            Some(random) => random.draw(),
            None => self.last + 1,
        } % self.blocks;
        self.last * self.block_bytes
    }
}

/// A drive that is connected.
struct Drive {
    /// The connection; the drive goes with it.
    _frontend: Frontend,
    memory: GuestMemoryMmap,
    kick: EventFd,
    call: EventFd,
    available: u16,
    used: u16,
    block_bytes: u64,
    /// When what is in a slot was asked for.
    asked: Vec<Instant>,
    random: SplitMix,
    /// Data of the next write.
    written: Vec<u8>,
}

impl Drive {
    /// With room for so many requests at a time, of so many bytes each.
    fn connect(socket: &Path, block_bytes: u64, depth: u32) -> anyhow::Result<Self> {
        ensure!(depth * u32::from(PARTS) <= u32::from(DESCRIPTORS), "a depth of {depth}");
        let bytes = REQUESTS + u64::from(depth) * (DATA_AT + block_bytes);
        let file = memfd_create("hecaton-bench", MemfdFlags::CLOEXEC)?;
        ftruncate(&file, bytes)?;
        let file = FileOffset::new(File::from(file), 0);
        let memory: GuestMemoryMmap = GuestMemoryMmap::from_ranges_with_files([(
            GuestAddress(0),
            bytes as usize,
            Some(file),
        )])
        .context("no memory for requests")?;
        // The one before may not have been noticed to be gone.
        let mut frontend = eventually(PATIENCE, || {
            Frontend::connect(socket, 1)
                .with_context(|| format!("no drive at {}", socket.display()))
        })?;
        let (kick, call) = (EventFd::new(0)?, EventFd::new(libc::EFD_NONBLOCK)?);
        set_up(&mut frontend, &memory, &kick, &call).context("the drive cannot be set up")?;
        Ok(Self {
            _frontend: frontend,
            memory,
            kick,
            call,
            available: 0,
            used: 0,
            block_bytes,
            asked: vec![Instant::now(); depth as usize],
            random: SplitMix::new(bytes),
            written: vec![0; block_bytes as usize],
        })
    }

    fn slot(&self, slot: u16) -> u64 {
        REQUESTS + u64::from(slot) * (DATA_AT + self.block_bytes)
    }

    fn data(&self, slot: u16) -> anyhow::Result<Vec<u8>> {
        let mut data = vec![0; self.block_bytes as usize];
        self.memory.read_slice(&mut data, GuestAddress(self.slot(slot) + DATA_AT))?;
        Ok(data)
    }

    /// Makes a request available to the server. Each write carries new data that do not compress.
    fn ask(&mut self, slot: u16, offset: u64, writes: bool) -> anyhow::Result<()> {
        let at = self.slot(slot);
        let kind = if writes { blk::VIRTIO_BLK_T_OUT } else { blk::VIRTIO_BLK_T_IN };
        let mut head = [0; HEAD_BYTES as usize];
        head[..4].copy_from_slice(&kind.to_le_bytes());
        head[8..].copy_from_slice(&(offset / SECTOR).to_le_bytes());
        self.memory.write_slice(&head, GuestAddress(at))?;
        if writes {
            for word in self.written.chunks_exact_mut(8) {
                word.copy_from_slice(&self.random.draw().to_le_bytes());
            }
            self.memory.write_slice(&self.written, GuestAddress(at + DATA_AT))?;
        }
        let status = at + u64::from(HEAD_BYTES);
        // Any but that of success.
        self.memory.write_obj(0xff_u8, GuestAddress(status))?;
        let of_server = ring::VRING_DESC_F_WRITE as u16;
        let next = ring::VRING_DESC_F_NEXT as u16;
        let of_data = if writes { next } else { next | of_server };
        let parts = [
            (at, HEAD_BYTES, next),
            (at + DATA_AT, self.block_bytes as u32, of_data),
            (status, 1, of_server),
        ];
        for (index, (address, bytes, flags)) in (slot * PARTS..).zip(parts) {
            let descriptor = Descriptor::new(address, bytes, flags, index + 1);
            let place = GuestAddress(TABLE.0 + u64::from(index) * size_of::<Descriptor>() as u64);
            self.memory.write_obj(descriptor, place)?;
        }
        let entry = GuestAddress(AVAILABLE.0 + 4 + 2 * u64::from(self.available % DESCRIPTORS));
        self.memory.store(slot * PARTS, entry, Release)?;
        self.available = self.available.wrapping_add(1);
        self.asked[usize::from(slot)] = Instant::now();
        self.memory.store(self.available, GuestAddress(AVAILABLE.0 + 2), Release)?;
        // The fence puts the store of the index before the load of the server's flags. The server
        // can then see the request before this thread decides whether to kick.
        fence(SeqCst);
        let flags: u16 = self.memory.load(USED, Acquire)?;
        if flags & ring::VRING_USED_F_NO_NOTIFY as u16 == 0 {
            self.kick.write(1)?;
        }
        Ok(())
    }

    /// Waits for an answer, and returns the slot of what was asked.
    fn answer(&mut self) -> anyhow::Result<u16> {
        let deadline = Instant::now() + PATIENCE;
        while !self.is_answered()? {
            self.want_calls(true)?;
            if self.is_answered()? {
                break;
            }
            ensure!(Instant::now() < deadline, "no answer within {} s", PATIENCE.as_secs());
            interrupt::check()?;
            // SAFETY: the descriptor is open for as long as `call` is there.
            let call = unsafe { BorrowedFd::borrow_raw(self.call.as_raw_fd()) };
            match poll(&mut [PollFd::new(&call, PollFlags::IN)], Some(&TICK)) {
                // That nobody has called by now is no failure.
                Ok(_) => drop(self.call.read()),
                Err(rustix::io::Errno::INTR) => {}
                Err(error) => return Err(error).context("cannot wait for the drive"),
            }
        }
        self.want_calls(false)?;
        let entry = USED.0 + 4 + 8 * u64::from(self.used % DESCRIPTORS);
        let head: u32 = self.memory.read_obj(GuestAddress(entry))?;
        self.used = self.used.wrapping_add(1);
        let slot = u16::try_from(head).ok().filter(|head| head.is_multiple_of(PARTS));
        let slot =
            slot.map(|head| head / PARTS).filter(|slot| usize::from(*slot) < self.asked.len());
        let slot = slot.with_context(|| format!("an answer to {head}, which was not asked"))?;
        let status = GuestAddress(self.slot(slot) + u64::from(HEAD_BYTES));
        let status: u8 = self.memory.read_obj(status)?;
        ensure!(u32::from(status) == blk::VIRTIO_BLK_S_OK, "a request failed with status {status}");
        Ok(slot)
    }

    fn is_answered(&self) -> anyhow::Result<bool> {
        let used: u16 = self.memory.load(GuestAddress(USED.0 + 2), Acquire)?;
        Ok(used != self.used)
    }

    /// Whether the server is to call when it has answered.
    fn want_calls(&self, wanted: bool) -> anyhow::Result<()> {
        let flags = if wanted { 0 } else { ring::VRING_AVAIL_F_NO_INTERRUPT as u16 };
        self.memory.store(flags, AVAILABLE, Release)?;
        // The fence puts this store before the caller's next look at the used ring.
        fence(SeqCst);
        Ok(())
    }
}

/// Hands the memory and the queue over.
fn set_up(
    frontend: &mut Frontend,
    memory: &GuestMemoryMmap,
    kick: &EventFd,
    call: &EventFd,
) -> anyhow::Result<()> {
    frontend.set_owner()?;
    let offered = frontend.get_features()?;
    let needed =
        1 << virtio_config::VIRTIO_F_VERSION_1 | VhostUserVirtioFeatures::PROTOCOL_FEATURES.bits();
    ensure!(offered & needed == needed, "it offers {offered:#x}, and {needed:#x} is needed");
    let told = frontend.get_protocol_features()?;
    let wanted = VhostUserProtocolFeatures::REPLY_ACK;
    ensure!(told.contains(wanted), "it does not acknowledge what it is told");
    frontend.set_protocol_features(wanted)?;
    frontend.set_hdr_flags(VhostUserHeaderFlag::NEED_REPLY);
    // A client that can flush lets the server answer writes early. Both servers may do so.
    frontend.set_features(offered & (needed | 1 << blk::VIRTIO_BLK_F_FLUSH))?;
    let regions = memory.iter().map(VhostUserMemoryRegionInfo::from_guest_region);
    frontend.set_mem_table(&regions.collect::<Result<Vec<_>, _>>()?)?;
    let host = |at| memory.get_host_address(at).map(|at| at as u64);
    frontend.set_vring_num(0, DESCRIPTORS)?;
    frontend.set_vring_base(0, 0)?;
    let addresses = VringConfigData {
        queue_max_size: DESCRIPTORS,
        queue_size: DESCRIPTORS,
        flags: 0,
        desc_table_addr: host(TABLE)?,
        avail_ring_addr: host(AVAILABLE)?,
        used_ring_addr: host(USED)?,
        log_addr: None,
    };
    frontend.set_vring_addr(0, &addresses)?;
    frontend.set_vring_call(0, call)?;
    frontend.set_vring_kick(0, kick)?;
    Ok(frontend.set_vring_enable(0, true)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_go_all_over_the_device_and_not_beyond() {
        for workload in Workload::ALL {
            let bytes = workload.block_bytes * 8;
            let mut places = Places::new(&workload, bytes);
            let mut seen = [false; 8];
            for _ in 0..500 {
                let place = places.next();
                assert!(place.is_multiple_of(workload.block_bytes) && place < bytes);
                seen[(place / workload.block_bytes) as usize] = true;
            }
            assert_eq!(seen, [true; 8], "{}", workload.name);
        }
    }
}
