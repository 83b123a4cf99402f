//! How what a node lends is divided among the donors of its NUMA nodes.

use crate::donors::{DonorSpec, DonorStart};

/// How large NUMA nodes are may change a little while a host runs, and with it their donors' parts
/// of what is lent. Those of the node before count, if they are parts of as much.
pub(crate) fn keep_division<'a>(
    specs: &mut [DonorSpec],
    left: impl Iterator<Item = &'a DonorStart> + Clone,
) {
    if specs.len() < 2 || specs.iter().any(|spec| spec.memory.numa_node.is_none()) {
        return;
    }
    let before = |spec: &DonorSpec| {
        let is_it = |start: &&DonorStart| start.name == spec.name && start.memory == spec.memory;
        left.clone().find(is_it).map(|start| start.lend_bytes)
    };
    let Some(parts) = specs.iter().map(before).collect::<Option<Vec<u64>>>() else { return };
    if parts.iter().sum::<u64>() == specs.iter().map(|spec| spec.lend_bytes).sum::<u64>() {
        for (spec, part) in specs.iter_mut().zip(parts) {
            spec.lend_bytes = part;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::donors::DonorMemory;

    #[test]
    fn what_is_lent_stays_divided_as_it_was() {
        let spec = |node: u32, lend_bytes| DonorSpec {
            name: format!("a-numa{node}"),
            lend_bytes,
            memory: DonorMemory { numa_node: Some(node), huge_pages: false },
            keep_free_bytes: None,
            park: None,
            tls_dir: None,
            listen: ([127, 0, 0, 1], 0).into(),
        };
        let left = |node: u32, lend_bytes: u64| -> DonorStart {
            let start = serde_json::json!({
                "name": format!("a-numa{node}"),
                "lend_bytes": lend_bytes,
                "memory": { "numa_node": node, "huge_pages": false },
                "labels": [],
            });
            serde_json::from_value(start).unwrap()
        };
        let kept = |left: &[DonorStart]| {
            let mut specs = [spec(0, 60), spec(2, 40)];
            keep_division(&mut specs, left.iter());
            specs.map(|spec| spec.lend_bytes)
        };
        assert_eq!(kept(&[left(2, 38), left(0, 62)]), [62, 38]);
        assert_eq!(kept(&[left(2, 38), left(0, 99)]), [60, 40], "it was told to lend more");
        assert_eq!(kept(&[left(0, 62)]), [60, 40], "one of them has ended");
        assert_eq!(kept(&[left(1, 38), left(0, 62)]), [60, 40], "another node's");
    }
}
