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
//! {"pager_stats":{"consumer":"sort-417","faults":812,...}}        "done"
//! {"resume":{"name":"sort-417","socket":"...","pid":420}}         {"pager":{"name":"sort-417",...}}
//! "donors"                                     {"donors":[{"name":"donor-1",...}]}
//! "status"                                     {"status":{"name":"a",...}}
//! ```

use crate::report::{DonorAddress, NodeReport};
use hecaton_pager::{Guest, Placement, RamRange, Stats};
use serde::{Deserialize, Serialize};
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
    /// The launcher's program has ended: the pager ends too, once nothing that the program left
    /// behind uses it. Only on the connection that started the pager.
    LaunchOver,
    /// From a pager: its statistics at this moment.
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
    /// The pager has ended.
    PagerEnded(Box<PagerEnd>),
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
