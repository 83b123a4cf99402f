//! Defines the requests and answers of `node.sock`: one JSON line each way.
//!
//! The node answers each request with one [`Answer`], in order. The connection on which a launcher
//! (`hecaton run`) started a pager is that pager's launch line. The node sends
//! [`Answer::PagerEnded`] on it unasked when the pager has ended. When the launcher closes it, or
//! sends [`Request::LaunchOver`], the node tells the pager that no further program will start.
//!
//! ```text
//! {"start_pager":{"name":"sort-417","local_bytes":268435456}}
//!     {"pager":{"name":"sort-417","socket":"/run/user/1000/hecaton/pager-1.sock","pid":420}}
//! {"start_vm":{"name":"db","local_bytes":2147483648,"monitor":"/run/user/1000/hecaton/vm-db.qmp"}}
//!     {"pager":{"name":"db","socket":"/run/user/1000/hecaton/pager-2.sock","pid":421}}
//! {"resize_local":{"consumer":"db","bytes":3221225472}}           "done"
//! {"create_volume":{"name":"scratch","size_bytes":8589934592}}     "done"
//! {"resize_volume":{"volume":"scratch","size_bytes":17179869184}}  "done"
//! {"snapshot_volume":{"volume":"scratch","name":"monday"}}         "done"
//! {"create_vm":{"name":"db","kind":"regular","bytes":17179869184,"max_bytes":17179869184}}
//!     {"admitted":{"memory":{"parts":[...]},"monitor":"/run/hecaton/vms/db.qmp"}}
//! {"export_volume":{"volume":"scratch","address":"127.0.0.1:10809"}}
//!     {"exported":"127.0.0.1:10809"}
//! {"unexport_volume":{"volume":"scratch","address":"127.0.0.1:10809"}}  "done"
//! {"detach_volume":{"volume":"scratch","to":"b"}}                  {"detached":"192.0.2.1:40123"}
//! {"attach_volume":{"volume":"scratch","from":["a","192.0.2.1:40123"]}}  "done"
//! {"attach_volume":{"volume":"scratch","from":["a","192.0.2.1:40124"],"read_only":true}}  "done"
//! {"detach_volume":{"volume":"scratch"}}                            "done"
//! {"pager_stats":{"consumer":"sort-417","faults":812,...}}        {"target":{"bytes":536870912}}
//! {"resume":{"name":"sort-417","socket":"...","pid":420}}        {"pager":{"name":"sort-417",...}}
//! "donors"                                     {"donors":[{"name":"donor-1",...}]}
//! "status"                                     {"status":{"name":"a",...}}
//! ```

use crate::cluster::report::{DonorAddress, NodeReport};
use crate::volumes::ExportAddress;
use hecaton_broker::NewcomerKind;
use hecaton_pager::{Cold, Guest, Placement, RamRange, Stats};
use hecaton_vm::create::Memory;
use serde::{Deserialize, Serialize};
use std::net::SocketAddr;
use std::path::PathBuf;

/// A request to a node.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Request {
    /// The node and all it runs. Answered with [`Answer::Status`].
    Status,
    /// The donors of the cluster that the node knows. Answered with [`Answer::Donors`].
    Donors,
    /// Start a pager. Answered with [`Answer::Pager`] once it listens.
    StartPager(StartPager),
    /// Start a pager for a virtual machine, and follow the machine. Answered with
    /// [`Answer::Pager`]; the connection is the pager's launch line, as with
    /// [`Request::StartPager`]. The launcher (`hecaton vm run`) sends this, or `libhecaton.so` in a
    /// QEMU that another program has started.
    StartVm(StartVm),
    /// Make this connection the launch line of a pager whose own launch line led to a node that was
    /// killed since. Answered with [`Answer::Pager`].
    Resume(PagerAddress),
    /// Change a consumer's local memory. Answered when no more than that is local.
    ResizeLocal(ResizeLocal),
    /// Use other donors for a consumer from now on, and move pages that are elsewhere to them.
    Place(Place),
    /// Fetch all memory of a virtual machine and stop paging it, while the machine runs. Answered
    /// once this has begun; it is complete when the machine is reported as detached.
    Detach(String),
    /// Admit the machine that this process will become. Answered with [`Answer::Admitted`] once its
    /// memory is free, and not before. The same process may send this again to another node.
    CreateVm(CreateVm),
    /// Create a volume. Answered with [`Answer::Done`] once it is served.
    CreateVolume(CreateVolume),
    /// Serve a volume at one more address. Answered with [`Answer::Exported`].
    ExportVolume(Export),
    /// Stop serving a volume at an address. Refused while a client is attached, unless forced.
    UnexportVolume(Unexport),
    /// Copy a volume as of one moment. Answered with [`Answer::Done`] once the copy is served.
    SnapshotVolume(SnapshotVolume),
    /// Give a volume another size. Refused if this would cut off data that is in use.
    ResizeVolume(ResizeVolume),
    /// Delete a volume with all data and free its memory. Refused while clients are connected.
    DeleteVolume(String),
    /// Offer a volume to another node: refused while it is exported, answered with
    /// [`Answer::Detached`]. Or stop reading another node's volume: answered with [`Answer::Done`].
    DetachVolume(DetachVolume),
    /// Attach a volume that another node offers to this one, or one that this node has detached and
    /// not given away. Answered with [`Answer::Done`] once it is served.
    AttachVolume(AttachVolume),
    /// The launcher's program has ended: the pager ends too, once no process that the program left
    /// behind uses the pager. Allowed only on the connection that started the pager.
    LaunchOver,
    /// From a pager: its statistics at this moment. Answered with [`Answer::Target`], or with
    /// [`Answer::Done`] while the node does not know the target.
    PagerStats(Box<PagerStats>),
}

/// A request for a pager.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct StartPager {
    /// The consumer's name; no other consumer of the node may have it.
    pub name: String,
    /// Most bytes of the consumer's memory that stay on this host.
    pub local_bytes: u64,
    /// The number of copies, the donors, and how long to wait for a donor, among others.
    #[serde(default, skip_serializing_if = "Wanted::is_default")]
    pub wanted: Wanted,
    /// How a virtual machine hands its memory over; none for a program.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub guest: Option<Guest>,
}

/// A request for a virtual machine's pager.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct StartVm {
    /// The machine's name; it is the consumer's too.
    pub name: String,
    /// Most bytes of its memory that stay on this host.
    pub local_bytes: u64,
    /// The number of copies, the donors, and how long to wait for a donor, among others.
    #[serde(default, skip_serializing_if = "Wanted::is_default")]
    pub wanted: Wanted,
    /// Where its QMP monitor listens, or will listen. Without a monitor, the machine is not stopped
    /// when pages are lost, but waits for them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub monitor: Option<PathBuf>,
    /// How its memory is handed over, if QEMU does not hand it over.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub guest: Option<Guest>,
}

/// A request for a machine on the host's own memory.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CreateVm {
    /// Its name; no other machine of the agent may have it. A domain has libvirt's name.
    pub name: String,
    /// Its kind: regular, spot or harvest.
    pub kind: NewcomerKind,
    /// Memory that it has from its start; a harvest VM's minimum.
    pub bytes: u64,
    /// The most memory that a harvest VM may have; for other machines the same as `bytes`.
    pub max_bytes: u64,
    /// The kernel's number of the host's NUMA node that it must start on; any node if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub numa_node: Option<u32>,
    /// Cores that it keeps while it exists (a harvest VM's minimum); 0 if it takes no part.
    #[serde(default, skip_serializing_if = "takes_no_part")]
    pub cores: u32,
    /// A harvest VM that has its maximum from its start, and gives memory back by a balloon.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub balloon: bool,
    /// Not a machine but a memory cgroup, which this process enters.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub container: bool,
    /// The UUID of the libvirt domain that it will be: this process only sends the request.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub domain: Option<String>,
}

/// For serde: whether a machine with this many cores takes no part in the division of cores.
pub(crate) fn takes_no_part(cores: &u32) -> bool {
    *cores == 0
}

/// The memory that a machine owns from now on.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Admitted {
    /// The memory to start the machine with.
    pub memory: Memory,
    /// Where its QMP monitor must listen. A domain has libvirt's monitor, and a container has none.
    pub monitor: PathBuf,
    /// Where the port of the manager inside it must listen; none if the machine does not shrink.
    #[serde(default)]
    pub guest_port: Option<PathBuf>,
}

/// A request for a volume.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CreateVolume {
    /// Its name; no other volume of the node may have it.
    pub name: String,
    /// Its size, of whole pages.
    pub size_bytes: u64,
    /// Copies of each page; the node's default if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub copies: Option<u8>,
    /// The only donors that may be used; all if there are none.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub donors: Vec<String>,
    /// Seconds that a donor may be unreachable before requests for its pages fail; 60 if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub donor_patience_s: Option<u64>,
    /// As in [`Wanted`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub scrub_bytes_per_s: Option<u64>,
    /// As in [`Wanted`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub copying_bytes_per_s: Option<u64>,
    /// As in [`Wanted`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub failover_ms: Option<u64>,
    /// A file to create on this host, for pages that the pool has no room for.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub spill: Option<PathBuf>,
    /// Most bytes of the pool that all copies together take; the rest goes to the spill file.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub limit_bytes: Option<u64>,
    /// Several clients may write at a time.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub multi_writer: bool,
    /// The kernel will swap to it, so its process reserves all memory that it needs in advance.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub for_swap: bool,
    /// Most bytes of writes that are acknowledged before donors have them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub write_buffer_bytes: Option<u64>,
    /// As in [`Wanted`]; the spill file, too, gets only encrypted pages.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub encrypt: bool,
}

/// A request to serve a volume at one more address.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Export {
    /// The volume.
    pub volume: String,
    /// Where clients connect; port 0 takes a free port.
    pub address: ExportAddress,
    /// Clients may not write.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub read_only: bool,
    /// Clients must speak TLS, and are shown the certificate in this directory.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tls: Option<PathBuf>,
    /// For an export to nodes: other hosts may reach it without encryption or authentication.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub insecure: bool,
    /// Receive the requests of a file through io_uring, if the kernel has it.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub uring: bool,
}

/// A request to stop serving a volume at an address.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Unexport {
    /// The volume.
    pub volume: String,
    /// Where it is served.
    pub address: ExportAddress,
    /// Disconnect clients that are attached there.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub force: bool,
}

/// A copy of a volume as of one moment.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SnapshotVolume {
    /// The volume.
    pub volume: String,
    /// The copy, a volume that no client may write to.
    pub name: String,
}

/// A request to hand a volume over to another node.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DetachVolume {
    /// The volume.
    pub volume: String,
    /// The only node that may attach it; none to stop reading a volume that is only read here.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub to: Option<String>,
    /// Where that node connects; port 0 takes a free port. This node's donor address if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub listen: Option<SocketAddr>,
    /// Other hosts may reach `listen`, though nothing is encrypted or authenticated.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub insecure: bool,
}

/// A request to attach a volume of another node, or one that was detached here.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct AttachVolume {
    /// The volume.
    pub volume: String,
    /// The node that has the volume, and the address of its offer; none if this node has it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub from: Option<(String, SocketAddr)>,
    /// Only read the volume here, beside other readers; it stays the other node's.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub read_only: bool,
}

/// Another size of a volume.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ResizeVolume {
    /// The volume.
    pub volume: String,
    /// Its size from now on, of whole pages.
    pub size_bytes: u64,
}

/// A consumer's requirements of the pool.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Wanted {
    /// Copies of each page; the node's default if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub copies: Option<u8>,
    /// The only donors that may be used; all if there are none.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub donors: Vec<String>,
    /// Donors for parts of a machine's RAM.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub ranges: Vec<RamRange>,
    /// Seconds that a donor may be unreachable before a program that needs its page is ended, or a
    /// machine stopped; 60 if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub donor_patience_s: Option<u64>,
    /// Seconds that donors keep the memory without hearing from its host; 60 if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub lease_s: Option<u64>,
    /// Donors get pages only encrypted, and cannot alter them unnoticed.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub encrypt: bool,
    /// Bytes per second that donors read to scrub copies; 0 scrubs only pages that came back wrong.
    /// 32 MiB if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub scrub_bytes_per_s: Option<u64>,
    /// Bytes per second that all donors together copy to each other to create or move copies;
    /// 950 MiB if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub copying_bytes_per_s: Option<u64>,
    /// Milliseconds that a donor may be silent before other copies take its place; 150 if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub failover_ms: Option<u64>,
    /// Erasure code for cold segments, and when they are cold; no erasure coding if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cold: Option<Cold>,
}

impl Wanted {
    /// Makes a placement, with `copies` as the default number of copies.
    pub fn or(self, copies: u8) -> Placement {
        let copies = self.copies.unwrap_or(copies);
        Placement { copies, donors: self.donors, ranges: self.ranges }
    }

    fn is_default(&self) -> bool {
        *self == Wanted::default()
    }
}

/// Other donors for a consumer.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Place {
    /// The consumer.
    pub consumer: String,
    /// The only donors that may be used from now on; all if there are none.
    pub donors: Vec<String>,
    /// Donors for parts of a machine's RAM from now on.
    pub ranges: Vec<RamRange>,
}

/// Another size of a consumer's local memory.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ResizeLocal {
    /// The consumer.
    pub consumer: String,
    /// Most bytes that stay on this host from now on.
    pub bytes: u64,
}

/// A pager's statistics.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct PagerStats {
    /// The consumer of the pager.
    pub consumer: String,
    /// The counts of the pager.
    #[serde(flatten)]
    pub stats: Stats,
}

/// An answer of a node.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Answer {
    /// Done, and nothing to tell.
    Done,
    /// The node and all it runs.
    Status(Box<NodeReport>),
    /// The donors of the cluster.
    Donors(Vec<DonorAddress>),
    /// The pager listens.
    Pager(PagerAddress),
    /// The most that the pager's consumer may hold in the pool; unlimited without `bytes`.
    Target {
        /// Bytes of its pages, each counted once.
        bytes: Option<u64>,
    },
    /// The pager has ended.
    PagerEnded(Box<PagerEnd>),
    /// The machine can be started.
    Admitted(Admitted),
    /// The volume is served there.
    Exported(ExportAddress),
    /// The other node can attach the volume at this address.
    Detached(SocketAddr),
    /// Not done, and why.
    Refused(String),
}

/// Where a pager listens.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PagerAddress {
    /// The consumer's name.
    pub name: String,
    /// The socket that `libhecaton.so` connects to.
    pub socket: PathBuf,
    /// The address and key for programs that cannot reach it: a `Door` of `hecaton_uffd`.
    #[serde(default)]
    pub key: String,
    /// The pager's process, leader of its process group.
    pub pid: u32,
}

/// How a pager ended.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct PagerEnd {
    /// The consumer's name.
    pub name: String,
    /// The failure; `None` if the pager released everything without one.
    pub error: Option<String>,
    /// The last statistics that it sent, if it ever did.
    pub stats: Option<Stats>,
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn the_lines_are_as_documented() {
        let line = |request: &Request| serde_json::to_value(request).expect("serialised");
        assert_eq!(line(&Request::Status), json!("status"));
        let wish = StartPager {
            name: "sort-417".into(),
            local_bytes: 1,
            guest: None,
            wanted: Wanted { donor_patience_s: Some(60), ..Wanted::default() },
        };
        assert_eq!(
            line(&Request::StartPager(wish)),
            json!({"start_pager": {"name": "sort-417", "local_bytes": 1,
                "wanted": {"donor_patience_s": 60}}})
        );
        let wanted = Wanted { encrypt: true, ..Wanted::default() };
        assert_eq!(serde_json::to_value(&wanted).expect("serialised"), json!({"encrypt": true}));
        let stats = PagerStats { consumer: "a".into(), stats: Stats::default() };
        assert_eq!(line(&Request::PagerStats(Box::new(stats)))["pager_stats"]["faults"], 0);
    }
}
