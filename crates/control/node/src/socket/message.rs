//! What is said over `node.sock`: one line of JSON each way.
//!
//! Every request is answered by one [`Answer`], in order. The connection on which a launcher
//! (`hecaton run`) started a pager is that pager's launch line: [`Answer::PagerEnded`] comes on it
//! by itself when the pager has ended, and when the launcher closes it, or says
//! [`Request::LaunchOver`], the pager is told that no further program will be started.
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
//! {"resume":{"name":"sort-417","socket":"...","pid":420}}         {"pager":{"name":"sort-417",...}}
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

/// What may be asked of a node.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Request {
    /// The node and all it runs. Answered with [`Answer::Status`].
    Status,
    /// The donors of the cluster, as far as the node knows. Answered with [`Answer::Donors`].
    Donors,
    /// Start a pager. Answered with [`Answer::Pager`] once it listens.
    StartPager(StartPager),
    /// Start a pager for a virtual machine, and follow the machine. Answered with
    /// [`Answer::Pager`]; the connection is the pager's launch line, as with
    /// [`Request::StartPager`]. It is the launcher who asks (`hecaton vm run`), or `libhecaton.so` in
    /// a QEMU that somebody else has started.
    StartVm(StartVm),
    /// Be the launch line of a pager that was started over another one, to a node that was killed
    /// since. Answered with [`Answer::Pager`].
    Resume(PagerAddress),
    /// Change a consumer's local memory. Answered when no more than that is local.
    ResizeLocal(ResizeLocal),
    /// Use other donors for a consumer from now on, and move what is elsewhere.
    Place(Place),
    /// Bring a virtual machine's memory home and page it no longer, while it runs on. Answered
    /// once that has begun; it is done when the machine is reported as detached.
    Detach(String),
    /// Admit a machine that this process is to become. Answered with [`Answer::Admitted`] once its memory is
    /// free, and until then not at all. May be asked again of another node, by the same process.
    CreateVm(CreateVm),
    /// Create a volume. Answered with [`Answer::Done`] once it is served.
    CreateVolume(CreateVolume),
    /// Serve a volume at one more address. Answered with [`Answer::Exported`].
    ExportVolume(Export),
    /// Serve a volume at an address no more. Refused while somebody is attached there, unless it is forced.
    UnexportVolume(Unexport),
    /// Copy a volume as it is at one moment. Answered with [`Answer::Done`] once the copy is served.
    SnapshotVolume(SnapshotVolume),
    /// Give a volume another size. Refused if what is in use would be cut off.
    ResizeVolume(ResizeVolume),
    /// Give a volume's memory back, with all data. Refused while clients are connected.
    DeleteVolume(String),
    /// Let another node have a volume. Refused while it is exported. Answered with [`Answer::Detached`]. Or read one no more
    /// that is another node's: answered with [`Answer::Done`].
    DetachVolume(DetachVolume),
    /// Have a volume that another node lets this one have; or one that this node has detached and not given away.
    /// Answered with [`Answer::Done`] once it is served.
    AttachVolume(AttachVolume),
    /// The launcher's program has ended: the pager ends too, once nothing that the program left
    /// behind uses it. Only on the connection that started the pager.
    LaunchOver,
    /// From a pager: its statistics at this moment. Answered with [`Answer::Target`], or with
    /// [`Answer::Done`] while the node does not know.
    PagerStats(Box<PagerStats>),
}

/// A wish for a pager.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct StartPager {
    /// The consumer's name; no other consumer of the node may have it.
    pub name: String,
    /// Most bytes of the consumer's memory that stay on this host.
    pub local_bytes: u64,
    /// In how many copies the memory is to be kept, with whom, and how long a donor is waited for.
    #[serde(default, skip_serializing_if = "Wanted::is_default")]
    pub wanted: Wanted,
    /// How a virtual machine hands its memory over; none for a program.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub guest: Option<Guest>,
}

/// A wish for a virtual machine's pager.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct StartVm {
    /// The machine's name; it is the consumer's too.
    pub name: String,
    /// Most bytes of its memory that stay on this host.
    pub local_bytes: u64,
    /// In how many copies its memory is to be kept, with whom, and how long a donor is waited for.
    #[serde(default, skip_serializing_if = "Wanted::is_default")]
    pub wanted: Wanted,
    /// Where its QMP monitor listens, or will; without one it is not stopped when pages are lost,
    /// but waits for them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub monitor: Option<PathBuf>,
    /// How its memory is handed over, if it is not by QEMU.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub guest: Option<Guest>,
}

/// A wish for a machine on the host's own memory.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CreateVm {
    /// Its name; no other machine of the agent may have it. Of a domain, libvirt's.
    pub name: String,
    /// What it is.
    pub kind: NewcomerKind,
    /// What it has from its start; a harvest VM's minimum.
    pub bytes: u64,
    /// The most that a harvest VM may have; of others the same as it has from its start.
    pub max_bytes: u64,
    /// The host's NUMA node that it is to be on from its start, by the kernel's number; any if nothing is said.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub numa_node: Option<u32>,
    /// Cores that it has as long as it exists, a harvest VM's minimum; 0 for one that takes no part in their division.
    #[serde(default, skip_serializing_if = "takes_no_part")]
    pub cores: u32,
    /// A harvest VM that has its maximum from its start, and gives back by a balloon.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub balloon: bool,
    /// No machine but a memory cgroup, which this process enters.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub container: bool,
    /// The UUID of libvirt's domain that it will be: this process only asks.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub domain: Option<String>,
}

/// For serde: whether a machine that is to have so many cores takes no part in their division.
pub(crate) fn takes_no_part(cores: &u32) -> bool {
    *cores == 0
}

/// A machine's memory, which is its own from now on.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Admitted {
    /// What it is to be started with.
    pub memory: Memory,
    /// Where its QMP monitor is to listen. A domain's is libvirt's own, and a container has none.
    pub monitor: PathBuf,
    /// Where the port of the manager inside it is to listen; none for a machine that does not shrink.
    #[serde(default)]
    pub guest_port: Option<PathBuf>,
}

/// A wish for a volume.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CreateVolume {
    /// Its name; no other volume of the node may have it.
    pub name: String,
    /// Its size, of whole pages.
    pub size_bytes: u64,
    /// Copies of each page; the node's default if nothing is said.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub copies: Option<u8>,
    /// The only donors that may be used; all if there are none.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub donors: Vec<String>,
    /// Seconds that a donor may be away before requests for its pages fail; a minute if nothing is said.
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
    /// A file on this host, which is made, for what the pool has no room for.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub spill: Option<PathBuf>,
    /// Most bytes of the pool that all copies together take; the rest goes to that file.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub limit_bytes: Option<u64>,
    /// Several clients may write at a time.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub multi_writer: bool,
    /// The kernel is to swap to it: its process has the memory that it needs in advance.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub for_swap: bool,
    /// Answers writes before donors have them, as long as these are not more bytes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub write_buffer_bytes: Option<u64>,
    /// As in [`Wanted`]; the spill file, too, gets pages only so.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub encrypt: bool,
}

/// Where a volume is to be served.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Export {
    /// The volume.
    pub volume: String,
    /// Where clients are to connect; port 0 takes a free one.
    pub address: ExportAddress,
    /// They may not write.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub read_only: bool,
    /// They are to speak TLS, and are shown the certificate in this directory.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tls: Option<PathBuf>,
    /// Where other nodes are to come: other hosts may reach that address, though nothing is encrypted or authenticated.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub insecure: bool,
    /// The requests of a file are to come through io_uring, if the kernel has it.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub uring: bool,
}

/// Where a volume is to be served no more.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Unexport {
    /// The volume.
    pub volume: String,
    /// Where it is served.
    pub address: ExportAddress,
    /// Whoever is attached there is cut off.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub force: bool,
}

/// A copy of a volume as of one moment.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SnapshotVolume {
    /// The volume.
    pub volume: String,
    /// The copy, which is a volume that nobody may write to.
    pub name: String,
}

/// A volume that is to go to another node.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DetachVolume {
    /// The volume.
    pub volume: String,
    /// The node, and no other; none if it is only read here, and is to be no more.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub to: Option<String>,
    /// Where that one is to connect, with port 0 at a free one; the address of this node's donors if nothing is said.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub listen: Option<SocketAddr>,
    /// Other hosts may reach that address, though nothing is encrypted or authenticated.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub insecure: bool,
}

/// A volume that comes from another node.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct AttachVolume {
    /// The volume.
    pub volume: String,
    /// The node that has it, and where it offers it; none if it is this one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub from: Option<(String, SocketAddr)>,
    /// To be read here, beside others, and to stay the other node's.
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

/// What a consumer wants of the pool.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Wanted {
    /// Copies of each page; the node's default if nothing is said.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub copies: Option<u8>,
    /// The only donors that may be used; all if there are none.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub donors: Vec<String>,
    /// Donors for parts of a machine's RAM.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub ranges: Vec<RamRange>,
    /// Seconds that a donor may be away before a program that wants a page of it is ended, or a
    /// machine stopped; a minute if nothing is said.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub donor_patience_s: Option<u64>,
    /// Seconds that donors keep the memory without hearing from its host; a minute if nothing is said.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub lease_s: Option<u64>,
    /// Donors get pages only encrypted, and cannot alter them unnoticed.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub encrypt: bool,
    /// Bytes that donors read in a second to compare the copies of pages, 0 for none but those that came
    /// back wrong; 32 MiB if nothing is said.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub scrub_bytes_per_s: Option<u64>,
    /// Bytes that donors copy to each other in a second, all together, when copies are made anew or moved;
    /// 950 MiB if nothing is said.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub copying_bytes_per_s: Option<u64>,
    /// Milliseconds that a donor may be silent before other copies take its place; 150 if nothing
    /// is said.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub failover_ms: Option<u64>,
    /// What is kept in an erasure code when it has gone cold; nothing if nothing is said.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cold: Option<Cold>,
}

impl Wanted {
    /// With a number of copies where nothing is said of it.
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
    /// Whose.
    pub consumer: String,
    /// The only donors that may be used from now on; all if there are none.
    pub donors: Vec<String>,
    /// Donors for parts of a machine's RAM from now on.
    pub ranges: Vec<RamRange>,
}

/// Another size of a consumer's local memory.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ResizeLocal {
    /// Whose.
    pub consumer: String,
    /// Most bytes that stay on this host from now on.
    pub bytes: u64,
}

/// A pager's statistics.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct PagerStats {
    /// Whose pager it is.
    pub consumer: String,
    /// What it counted.
    #[serde(flatten)]
    pub stats: Stats,
}

/// What a node answers.
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
    /// What the pager's consumer may hold of the pool; nothing limits it if there are no `bytes`.
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
    /// The other node can have it there.
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
    /// What went wrong; `None` if all was released in peace.
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
