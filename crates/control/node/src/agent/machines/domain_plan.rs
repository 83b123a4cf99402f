//! Plans a libvirt domain as a machine of the agent, like any other. Pure.

use crate::agent::machines::process::ProcessId;
use crate::agent::machines::record::{DomainRecord, Record};
use hecaton_broker::NewcomerKind;
use hecaton_vm::create::{BLOCK_BYTES, Memory, Part};
use hecaton_vm::domain::harvest::{Domain, Growing};

/// Most bytes of a domain's name as a machine, its prefix included.
const MAX_NAME_BYTES: usize = 64;

/// The name of a domain as a machine. No other machine can have such a name.
pub(crate) fn machine_name(domain: &str) -> String {
    let mut name = String::from("libvirt:");
    for character in domain.chars() {
        if name.len() + character.len_utf8() > MAX_NAME_BYTES {
            break;
        }
        name.push(if character.is_control() { '_' } else { character });
    }
    name
}

/// Plans a domain that runs as `process` on a host with these nodes (number, bytes). Also returns
/// the reason if a domain that should be a harvest VM cannot be one.
pub(crate) fn plan(
    domain: &Domain,
    process: ProcessId,
    nodes: &[(u32, u64)],
) -> (Record, Option<String>) {
    let (growing, unfit) = match (&domain.harvest, &domain.unfit) {
        (Some(_), _) if nodes.len() > 1 && domain.host_node.is_none() => {
            let reason = "its memory is not bound to one NUMA node of this host (<numatune>)";
            (None, Some(reason.to_owned()))
        }
        (Some(growing), _) => (Some(growing), None),
        (None, unfit) => (None, unfit.clone()),
    };
    let parts = match growing {
        Some(Growing { device, .. }) => {
            let host_node = domain.host_node.filter(|_| nodes.len() > 1);
            let (base_bytes, more_bytes) = (domain.base_bytes, device.max_bytes);
            vec![Part { host_node, base_bytes, more_bytes }]
        }
        None => spread(domain.max_bytes(), domain.host_node, nodes),
    };
    let record = Record {
        name: machine_name(&domain.name),
        kind: if growing.is_some() { NewcomerKind::Harvest } else { NewcomerKind::Regular },
        process,
        max_bytes: domain.max_bytes(),
        memory: Memory { parts, is_ballooned: false },
        cores: 0,
        gives_way: false,
        domain: Some(DomainRecord {
            uuid: domain.uuid.clone(),
            guest_port: growing.and_then(|growing| growing.guest_port.clone()),
            is_promised: false,
        }),
        cgroup: None,
    };
    (record, unfit)
}

/// Divides memory among all nodes in proportion to their sizes, unless it is bound to one node.
fn spread(bytes: u64, host_node: Option<u32>, nodes: &[(u32, u64)]) -> Vec<Part> {
    let one = |host_node, base_bytes| Part { host_node, base_bytes, more_bytes: 0 };
    if nodes.len() < 2 {
        return vec![one(None, bytes)];
    }
    if let Some(node) = host_node.filter(|node| nodes.iter().any(|(there, _)| there == node)) {
        return vec![one(Some(node), bytes)];
    }
    let all: u64 = nodes.iter().map(|(_, bytes)| bytes).sum();
    let part = |total: u64| {
        let part = u128::from(bytes) * u128::from(total) / u128::from(all.max(1));
        part as u64 / BLOCK_BYTES * BLOCK_BYTES
    };
    let mut parts: Vec<Part> =
        nodes.iter().map(|(node, total)| one(Some(*node), part(*total))).collect();
    // The first node gets the remainder of the division.
    let rest = bytes - parts.iter().map(|part| part.base_bytes).sum::<u64>();
    parts[0].base_bytes += rest;
    parts
}

#[cfg(test)]
mod tests {
    use super::*;
    use hecaton_vm::memory_device::MemoryDevice;

    const M: u64 = 1 << 20;

    fn domain(base_bytes: u64, more_bytes: u64, host_node: Option<u32>) -> Domain {
        let device = MemoryDevice {
            id: "virtiomem0".into(),
            backend: String::new(),
            guest_node: 0,
            block_bytes: 2 * M,
            max_bytes: more_bytes,
            requested_bytes: 0,
            plugged_bytes: 0,
        };
        let growing = Growing { device, guest_port: Some("/run/port".into()) };
        Domain {
            name: "db\n1".into(),
            uuid: "u".into(),
            host_node,
            base_bytes,
            harvest: (more_bytes > 0).then_some(growing),
            unfit: None,
        }
    }

    fn planned(domain: &Domain, nodes: &[(u32, u64)]) -> (Record, Option<String>) {
        plan(domain, ProcessId::of(std::process::id()).expect("this process"), nodes)
    }

    fn parts(record: &Record) -> Vec<(Option<u32>, u64, u64)> {
        let part = |part: &Part| (part.host_node, part.base_bytes / M, part.more_bytes / M);
        record.memory.parts.iter().map(part).collect()
    }

    #[test]
    fn a_harvest_vm_is_one_where_its_memory_is_of_one_node() {
        let (record, unfit) = planned(&domain(256 * M, 768 * M, None), &[(0, 4096 * M)]);
        assert_eq!((record.kind, unfit), (NewcomerKind::Harvest, None));
        assert_eq!((record.name.as_str(), record.max_bytes), ("libvirt:db_1", 1024 * M));
        assert_eq!(parts(&record), [(None, 256, 768)]);
        let two = [(0, 4096 * M), (3, 4096 * M)];
        let (record, unfit) = planned(&domain(256 * M, 768 * M, Some(3)), &two);
        assert_eq!((parts(&record), unfit), (vec![(Some(3), 256, 768)], None));
        let (record, unfit) = planned(&domain(256 * M, 768 * M, None), &two);
        assert_eq!(record.kind, NewcomerKind::Regular);
        assert_eq!(parts(&record), [(Some(0), 512, 0), (Some(3), 512, 0)]);
        assert!(unfit.expect("a reason").contains("<numatune>"));
        assert!(record.domain.expect("a domain").guest_port.is_none());
    }

    #[test]
    fn what_is_bound_to_no_node_is_spread_over_all_and_none_of_it_lost() {
        for (nodes, expected) in [
            (&[(0, 300 * M), (1, 100 * M)][..], vec![(Some(0), 76, 0), (Some(1), 24, 0)]),
            (&[(0, 0), (1, 0)][..], vec![(Some(0), 100, 0), (Some(1), 0, 0)]),
            (&[(7, 300 * M)][..], vec![(None, 100, 0)]),
        ] {
            let (record, _) = planned(&domain(100 * M, 0, None), nodes);
            assert_eq!(parts(&record), expected);
        }
    }

    #[test]
    fn a_long_name_is_cut_between_its_letters() {
        assert_eq!(machine_name(&"ü".repeat(99)), format!("libvirt:{}", "ü".repeat(28)));
    }
}
