//! A vhost-user-blk device: a virtual machine's drive, whose requests are read from the guest's own
//! memory.
//!
//! The machine monitor connects, hands over the guest's memory and its queues, and is out of the
//! way from then on. A guest goes on when the process that serves it is killed: the monitor keeps
//! which requests were under way ([`inflight`]), connects again, and the next process does those
//! once more. Done twice, a write or a discard is as done once.
//!
//! The protocol's messages are the `vhost` crate's, the rings those of `virtio-queue`; its daemon
//! crate is not used, because it keeps no requests in flight. All data is copied once between the
//! guest and this process: a guest may change its memory at any time, and the checksum of a page
//! must be that of the page that is sent.
//!
//! | module | what it is about |
//! |---|---|
//! | `device` | the monitor's messages, and the state that they make |
//! | `drive` | what the guest may do with the volume, and when its writes are answered |
//! | `config` | what the guest is told of its drive |
//! | `backend_channel` | the way by which the monitor is told of what it has not asked for |
//! | `resize` | another size, while the guest runs |
//! | `ring` | a queue, and the threads that serve it |
//! | `intake` | its requests under way: the short ones together, the others for a thread each |
//! | `inflight` | what the monitor keeps of requests under way |
//! | `chain` | the buffers of a request, checked |
//! | `request` | what the guest wants, and doing it |

mod backend_channel;
mod chain;
mod config;
mod device;
mod drive;
mod inflight;
mod intake;
mod request;
mod resize;
mod ring;
#[cfg(test)]
mod tests;

pub(crate) use device::serve;

/// The memory of a guest.
type Memory = vm_memory::GuestMemoryMmap<()>;
