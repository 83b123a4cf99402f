//! A device: the messages of the machine monitor, and the state that they make.

use super::Memory;
use super::backend_channel::BackendChannel;
use super::chain::MAX_DESCRIPTORS;
use super::config::{self, EVENT_IDX, MAX_QUEUES, PROTOCOL_FEATURES, features};
use super::drive::Drive;
use super::inflight::{Journal, Region};
use super::resize::Size;
use super::ring::{Layout, Parts, Ring, SPARE_THREADS, SharedMemory, Signal};
use crate::attach::Role;
use crate::volume::Volume;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd as _, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::atomic::AtomicUsize;
use std::sync::{Arc, Mutex};
use vhost::vhost_user::message::{
    VhostTransferStateDirection, VhostTransferStatePhase, VhostUserConfigFlags, VhostUserInflight,
    VhostUserLog, VhostUserMemoryRegion, VhostUserProtocolFeatures, VhostUserShMemConfig,
    VhostUserSharedMsg, VhostUserSingleMemoryRegion, VhostUserVringAddrFlags, VhostUserVringState,
};
use vhost::vhost_user::{
    Backend, BackendReqHandler, Error, GpuBackend, Result, VhostUserBackendReqHandlerMut,
    VhostUserVirtioFeatures,
};
use vm_memory::{GuestAddress, GuestRegionMmap};

/// Longest configuration space that is read.
const MAX_CONFIG_BYTES: u32 = 256;

/// Serves one machine's drive, until the machine has gone and all that it asked for is done.
pub(crate) fn serve(volume: Arc<Volume>, role: Role, socket: &File) {
    let name = volume.name().to_owned();
    let served = match socket.try_clone() {
        Ok(served) => OwnedFd::from(served),
        Err(error) => {
            tracing::warn!(volume = name, %error, "a machine's drive cannot be served");
            return;
        }
    };
    let device = Arc::new(Mutex::new(Device::new(volume, role)));
    let mut messages =
        BackendReqHandler::from_stream(UnixStream::from(served), Arc::clone(&device));
    let error = loop {
        let offered = BackendChannel::offered(socket.as_fd());
        device.lock().expect("no thread panics with the device").offered = offered;
        if let Err(error) = messages.handle_request() {
            break error;
        }
    };
    // Before the monitor can notice: it connects again at once, and hands the same queues to the
    // next one.
    device.lock().expect("no thread panics with the device").stop_all();
    if !matches!(error, Error::Disconnected | Error::SocketBroken(_)) {
        tracing::warn!(volume = name, %error, "the connection of a machine's drive is closed");
    }
}

/// State that the monitor has set so far.
struct Device {
    volume: Arc<Volume>,
    role: Role,
    /// Features that the guest has accepted.
    features: u64,
    memory: Arc<SharedMemory>,
    /// Where the monitor has the guest's memory: it names rings by its own addresses.
    mappings: Vec<Mapping>,
    inflight: Option<Arc<Region>>,
    queues: Vec<Queue>,
    spare_threads: Arc<AtomicUsize>,
    /// The channel that the message which is about to be handled has with it.
    offered: Option<BackendChannel>,
    /// Size of the drive, as the monitor knows it.
    size: Arc<Size>,
}

#[derive(Clone, Copy, Debug)]
struct Mapping {
    monitors: u64,
    guests: u64,
    bytes: u64,
}

#[derive(Default)]
struct Queue {
    descriptors: u16,
    /// Table, available ring and used ring.
    addresses: Option<[GuestAddress; 3]>,
    next_available: u16,
    kick: Option<File>,
    call: Arc<Signal>,
    error: Arc<Signal>,
    is_enabled: bool,
    running: Option<Ring>,
}

impl Queue {
    fn stop(&mut self) {
        if let Some(ring) = self.running.take() {
            self.next_available = ring.stop();
        }
    }
}

fn refused(error: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> Error {
    Error::ReqHandlerError(io::Error::other(error))
}

impl Device {
    fn new(volume: Arc<Volume>, role: Role) -> Device {
        let size = Arc::new(Size::new(Arc::clone(&volume)));
        volume.watch(&size);
        Device {
            volume,
            role,
            features: 0,
            memory: Arc::default(),
            mappings: Vec::new(),
            inflight: None,
            queues: (0..MAX_QUEUES).map(|_| Queue::default()).collect(),
            spare_threads: Arc::new(AtomicUsize::new(SPARE_THREADS)),
            offered: None,
            size,
        }
    }

    fn stop_all(&mut self) {
        self.size.set_running(false);
        self.queues.iter_mut().for_each(Queue::stop);
    }

    fn queue(&mut self, index: impl Into<u64>) -> Result<&mut Queue> {
        let index = usize::try_from(index.into()).map_err(|_| Error::InvalidParam)?;
        self.queues.get_mut(index).ok_or(Error::InvalidParam)
    }

    /// Changes a queue, which is not served meanwhile, and serves it as soon as all is known of it.
    fn change(&mut self, index: impl Into<u64>, change: impl FnOnce(&mut Queue)) -> Result<()> {
        let index = index.into();
        let queue = self.queue(index)?;
        queue.stop();
        change(queue);
        self.start(index)
    }

    fn start(&mut self, index: u64) -> Result<()> {
        let has_enabling = self.features & VhostUserVirtioFeatures::PROTOCOL_FEATURES.bits() != 0;
        let has_event_index = self.features & EVENT_IDX != 0;
        let drive = Drive::new(Arc::clone(&self.volume), self.role, self.features);
        let memory = Arc::clone(&self.memory);
        let (inflight, spare_threads) = (self.inflight.clone(), Arc::clone(&self.spare_threads));
        let queue = self.queue(index)?;
        let (Some([table, available, used]), Some(kick)) = (queue.addresses, &queue.kick) else {
            return Ok(());
        };
        if has_enabling && !queue.is_enabled {
            return Ok(());
        }
        let descriptors = queue.descriptors;
        let journal = match inflight {
            None => None,
            Some(region) => Some(
                Journal::open(region, index as u16, descriptors)
                    .ok_or_else(|| refused("the queue has no place among those in flight"))?,
            ),
        };
        let layout = Layout {
            descriptors,
            table,
            available,
            used,
            next_available: queue.next_available,
            has_event_index,
        };
        let parts = Parts {
            drive,
            memory,
            kick: kick.try_clone().map_err(refused)?,
            call: Arc::clone(&queue.call),
            error: Arc::clone(&queue.error),
            journal,
            spare_threads,
        };
        queue.running = Some(Ring::start(layout, parts).map_err(refused)?);
        self.size.set_running(true);
        Ok(())
    }

    fn guest_address(&self, monitors: u64) -> Result<GuestAddress> {
        let within = |mapping: &&Mapping| {
            monitors.checked_sub(mapping.monitors).is_some_and(|offset| offset < mapping.bytes)
        };
        let mapping = self.mappings.iter().find(within);
        let mapping = mapping.ok_or_else(|| refused("a queue is outside of the guest's memory"))?;
        Ok(GuestAddress(mapping.guests + (monitors - mapping.monitors)))
    }
}

impl VhostUserBackendReqHandlerMut for Device {
    fn set_owner(&mut self) -> Result<()> {
        Ok(())
    }

    fn reset_owner(&mut self) -> Result<()> {
        self.stop_all();
        Ok(())
    }

    fn reset_device(&mut self) -> Result<()> {
        Err(Error::InactiveOperation(VhostUserProtocolFeatures::RESET_DEVICE))
    }

    fn get_features(&mut self) -> Result<u64> {
        Ok(features(self.role))
    }

    fn set_features(&mut self, wanted: u64) -> Result<()> {
        if wanted & !features(self.role) != 0 {
            return Err(Error::FeatureMismatch);
        }
        // A queue takes them up when it is started, which is after this message.
        self.features = wanted;
        Ok(())
    }

    fn set_mem_table(
        &mut self,
        regions: &[VhostUserMemoryRegion],
        files: Vec<File>,
        _postcopy_listening: Option<bool>,
    ) -> Result<Option<Vec<u64>>> {
        let (mut mapped, mut mappings) = (Vec::new(), Vec::new());
        for (region, file) in regions.iter().zip(files) {
            let guests = GuestAddress(region.guest_phys_addr);
            let mapping = GuestRegionMmap::new(region.mmap_region(file)?, guests);
            mapped.push(mapping.ok_or_else(|| refused("the guest's memory has no end"))?);
            mappings.push(Mapping {
                monitors: region.user_addr,
                guests: region.guest_phys_addr,
                bytes: region.memory_size,
            });
        }
        self.memory.set(Memory::from_regions(mapped).map_err(|error| refused(error.to_string()))?);
        self.mappings = mappings;
        Ok(None)
    }

    fn set_vring_num(&mut self, index: u32, num: u32) -> Result<()> {
        match u16::try_from(num) {
            Ok(descriptors @ 1..=MAX_DESCRIPTORS) => {
                self.change(index, |queue| queue.descriptors = descriptors)
            }
            _ => {
                Err(refused(format!("a queue of {num} descriptors; the most is {MAX_DESCRIPTORS}")))
            }
        }
    }

    fn set_vring_addr(
        &mut self,
        index: u32,
        _flags: VhostUserVringAddrFlags,
        descriptor: u64,
        used: u64,
        available: u64,
        _log: u64,
    ) -> Result<()> {
        let addresses = [
            self.guest_address(descriptor)?,
            self.guest_address(available)?,
            self.guest_address(used)?,
        ];
        self.change(index, |queue| queue.addresses = Some(addresses))
    }

    fn set_vring_base(&mut self, index: u32, base: u32) -> Result<()> {
        let next_available = u16::try_from(base).map_err(|_| Error::InvalidParam)?;
        self.change(index, |queue| queue.next_available = next_available)
    }

    fn get_vring_base(&mut self, index: u32) -> Result<VhostUserVringState> {
        // One follows the other until none is served.
        self.size.set_running(false);
        let queue = self.queue(index)?;
        queue.stop();
        // It is started again by a new one.
        queue.kick = None;
        Ok(VhostUserVringState::new(index, queue.next_available.into()))
    }

    fn set_vring_kick(&mut self, index: u8, fd: Option<File>) -> Result<()> {
        let kick = fd.ok_or_else(|| refused("a queue that is to be polled; it must be kicked"))?;
        self.change(index, |queue| queue.kick = Some(kick))
    }

    fn set_vring_call(&mut self, index: u8, fd: Option<File>) -> Result<()> {
        let queue = self.queue(index)?;
        queue.call.set(fd);
        if queue.running.is_some() {
            // The guest may have missed a signal to the previous descriptor.
            queue.call.send();
        }
        Ok(())
    }

    fn set_vring_err(&mut self, index: u8, fd: Option<File>) -> Result<()> {
        self.queue(index)?.error.set(fd);
        Ok(())
    }

    fn get_protocol_features(&mut self) -> Result<VhostUserProtocolFeatures> {
        Ok(PROTOCOL_FEATURES)
    }

    fn set_protocol_features(&mut self, features: u64) -> Result<()> {
        match features & !PROTOCOL_FEATURES.bits() {
            0 => Ok(()),
            _ => Err(Error::FeatureMismatch),
        }
    }

    fn get_queue_num(&mut self) -> Result<u64> {
        Ok(MAX_QUEUES.into())
    }

    fn set_vring_enable(&mut self, index: u32, enable: bool) -> Result<()> {
        self.change(index, |queue| queue.is_enabled = enable)
    }

    fn get_config(&mut self, offset: u32, size: u32, _: VhostUserConfigFlags) -> Result<Vec<u8>> {
        if offset.checked_add(size).is_none_or(|end| end > MAX_CONFIG_BYTES) {
            return Err(Error::InvalidParam);
        }
        let bytes = self.volume.size_bytes();
        self.size.set_read(bytes);
        let mut space = config::space(bytes);
        // Fields of later versions are zero.
        space.resize(MAX_CONFIG_BYTES as usize, 0);
        Ok(space[offset as usize..][..size as usize].to_vec())
    }

    fn set_config(&mut self, _: u32, _: &[u8], _: VhostUserConfigFlags) -> Result<()> {
        // There is no field that a guest may write; one that does so has no effect.
        Ok(())
    }

    fn set_backend_req_fd(&mut self, _: Backend) {
        self.size.set_channel(self.offered.take());
    }

    fn set_gpu_socket(&mut self, _: GpuBackend) -> Result<()> {
        Err(Error::InvalidOperation("a drive shows nothing"))
    }

    fn get_shared_object(&mut self, _: VhostUserSharedMsg) -> Result<File> {
        Err(Error::InactiveOperation(VhostUserProtocolFeatures::SHARED_OBJECT))
    }

    fn get_inflight_fd(&mut self, wanted: &VhostUserInflight) -> Result<(VhostUserInflight, File)> {
        let (queues, descriptors) = (wanted.num_queues, wanted.queue_size);
        if queues > MAX_QUEUES || descriptors > MAX_DESCRIPTORS {
            return Err(Error::InvalidParam);
        }
        let region = Region::create(queues, descriptors).map_err(refused)?;
        let file = File::from(region.try_clone_fd().map_err(refused)?);
        Ok((VhostUserInflight::new(region.bytes(), 0, queues, descriptors), file))
    }

    fn set_inflight_fd(&mut self, kept: &VhostUserInflight, file: File) -> Result<()> {
        let (queues, descriptors) = (kept.num_queues, kept.queue_size);
        if kept.mmap_offset != 0 || queues > MAX_QUEUES || descriptors > MAX_DESCRIPTORS {
            return Err(Error::InvalidParam);
        }
        let region = Region::from_fd(file.into(), queues, descriptors).map_err(refused)?;
        self.inflight = Some(Arc::new(region));
        Ok(())
    }

    fn get_max_mem_slots(&mut self) -> Result<u64> {
        Err(Error::InactiveOperation(VhostUserProtocolFeatures::CONFIGURE_MEM_SLOTS))
    }

    fn add_mem_region(
        &mut self,
        _: &VhostUserSingleMemoryRegion,
        _: File,
        _: Option<bool>,
    ) -> Result<Option<u64>> {
        Err(Error::InactiveOperation(VhostUserProtocolFeatures::CONFIGURE_MEM_SLOTS))
    }

    fn remove_mem_region(&mut self, _: &VhostUserSingleMemoryRegion) -> Result<()> {
        Err(Error::InactiveOperation(VhostUserProtocolFeatures::CONFIGURE_MEM_SLOTS))
    }

    fn set_device_state_fd(
        &mut self,
        _: VhostTransferStateDirection,
        _: VhostTransferStatePhase,
        _: File,
    ) -> Result<Option<File>> {
        Err(Error::InactiveOperation(VhostUserProtocolFeatures::DEVICE_STATE))
    }

    fn check_device_state(&mut self) -> Result<()> {
        Err(Error::InactiveOperation(VhostUserProtocolFeatures::DEVICE_STATE))
    }

    fn get_shmem_config(&mut self) -> Result<VhostUserShMemConfig> {
        Err(Error::InactiveOperation(VhostUserProtocolFeatures::SHMEM))
    }

    fn set_log_base(&mut self, _: &VhostUserLog, _: File) -> Result<()> {
        Err(Error::InactiveOperation(VhostUserProtocolFeatures::LOG_SHMFD))
    }
}
