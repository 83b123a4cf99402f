//! A volume as a block device of this host's kernel (ublk, Linux 6.4): `/dev/ublkbN`.
//!
//! The kernel's driver hands the requests of the device to a process, over io_uring. The device
//! outlives the processes that serve it, as a mount does. When a process is killed, its device
//! waits, and the successor gets the requests in flight again. A request that was done and not
//! answered is done twice, which has the same effect as once.
//!
//! This module speaks the driver's interface itself, without `libublk`. That crate's build needs
//! libclang, and a process here takes over the device that another one had made. The interface has
//! a dozen commands.
//!
//! | module | what it is about |
//! |---|---|
//! | `abi` | the driver's numbers, and what they are made of |
//! | `control` | making devices, starting and removing them |
//! | [`disk`] | a device, which outlives the processes that serve it |
//! | `left` | devices that nobody is left for |
//! | `owner` | whose a device is |
//! | `queue` | what the kernel asks for, and its answers |
//! | `request` | doing one of those |
//! | `size` | another size, while it is used |
//! | [`server`] | threads that answer |

mod abi;
mod control;
pub mod disk;
mod left;
mod owner;
mod queue;
mod request;
pub mod server;
mod size;

pub use control::{UblkError, check};
pub use disk::Disk;
pub use left::remove_left;
pub use owner::Owner;
pub use server::DiskServer;
