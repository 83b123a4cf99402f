//! Finds the circles in a graph of imports.

use crate::rule::{Finding, Rule};
use crate::tree::name;
use std::collections::{BTreeMap, BTreeSet, VecDeque};

/// Imports between files of one crate: for each file, the imported files with one path for each.
pub(super) type Imports = BTreeMap<String, BTreeMap<String, String>>;

/// Counts, for each file in a circle, the imports that lead back to the file.
pub(super) fn circles(imports: &Imports) -> Vec<Finding> {
    let reached: BTreeMap<&str, BTreeSet<&str>> =
        imports.keys().map(|file| (file.as_str(), reach(imports, file))).collect();
    let finding = |(file, targets): (&String, &BTreeMap<String, String>)| {
        let leads_back = |target: &&String| {
            reached.get(target.as_str()).is_some_and(|reached| reached.contains(file.as_str()))
        };
        let count = targets.keys().filter(leads_back).count();
        (count > 0).then(|| Finding {
            rule: Rule::Circles,
            path: file.clone(),
            value: u32::try_from(count).unwrap_or(u32::MAX),
            detail: shortest(imports, file),
        })
    };
    imports.iter().filter_map(finding).collect()
}

/// Every file that `start` imports, directly or not.
fn reach<'a>(imports: &'a Imports, start: &str) -> BTreeSet<&'a str> {
    let mut found = BTreeSet::new();
    let mut waiting = vec![start];
    while let Some(file) = waiting.pop() {
        for target in imports.get(file).into_iter().flat_map(BTreeMap::keys) {
            if found.insert(target.as_str()) {
                waiting.push(target);
            }
        }
    }
    found
}

/// Describes a shortest circle through `start`, with the path of each import.
fn shortest(imports: &Imports, start: &str) -> String {
    let mut came_from: BTreeMap<&str, &str> = BTreeMap::new();
    let mut waiting = VecDeque::from([start]);
    while let Some(file) = waiting.pop_front() {
        for target in imports.get(file).into_iter().flat_map(BTreeMap::keys) {
            if !came_from.contains_key(target.as_str()) {
                came_from.insert(target, file);
                waiting.push_back(target);
            }
        }
        if came_from.contains_key(start) {
            break;
        }
    }
    let mut steps = Vec::new();
    let mut file = start;
    while let Some(from) = came_from.get(file) {
        steps.push(format!("{} uses {} ({})", name(from), imports[*from][file], file));
        file = from;
        if file == start {
            break;
        }
    }
    steps.reverse();
    steps.join("\n")
}
