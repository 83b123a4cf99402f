//! Changes to an XML text in the places where they belong, and nowhere else: what is not changed
//! stays as it was written, blanks included.

use roxmltree::Node;
use std::ops::Range;

/// `text` as it stands between double quotes.
pub(super) fn escape(text: &str) -> String {
    let mut escaped = String::new();
    for character in text.chars() {
        match character {
            '&' => escaped += "&amp;",
            '<' => escaped += "&lt;",
            '"' => escaped += "&quot;",
            // A parser makes blanks of these, if they stand as they are.
            '\n' => escaped += "&#10;",
            '\t' => escaped += "&#9;",
            '\r' => escaped += "&#13;",
            other => escaped.push(other),
        }
    }
    escaped
}

/// Changes to a text, made all at once.
pub(super) struct Edits<'a> {
    text: &'a str,
    changes: Vec<(Range<usize>, String)>,
}

impl<'a> Edits<'a> {
    pub(super) fn new(text: &'a str) -> Edits<'a> {
        Edits { text, changes: Vec::new() }
    }

    /// The blanks before `at`, back to the line's beginning, and the line's break; empty if
    /// anything else stands before it in its line.
    fn margin(&self, at: usize) -> &'a str {
        let before = &self.text[..at];
        let blank = before.len() - before.trim_end_matches([' ', '\t']).len();
        match before[..before.len() - blank].ends_with('\n') {
            true => &before[before.len() - blank - 1..],
            false => "",
        }
    }

    fn lines(margin: &str, lines: &[String]) -> String {
        lines.iter().map(|line| format!("{margin}{line}")).collect()
    }

    /// Writes `lines` after `sibling`, or as the first of `parent`.
    pub(super) fn insert_after(
        &mut self,
        sibling: Option<Node<'_, '_>>,
        parent: Node<'_, '_>,
        lines: &[String],
    ) {
        match sibling {
            Some(sibling) => {
                let margin = self.margin(sibling.range().start);
                self.change(sibling.range().end..sibling.range().end, Self::lines(margin, lines));
            }
            None => {
                let first = parent.children().find(Node::is_element);
                let at = first.map_or(parent.range().end, |first| first.range().start);
                let margin = self.margin(at).to_owned();
                let start = at - margin.len();
                self.change(start..start, Self::lines(&margin, lines));
            }
        }
    }

    /// Writes `lines` before `sibling`.
    pub(super) fn insert_before(&mut self, sibling: Node<'_, '_>, lines: &[String]) {
        let margin = self.margin(sibling.range().start);
        let start = sibling.range().start - margin.len();
        self.change(start..start, Self::lines(margin, lines));
    }

    /// Writes `lines` as the last of `parent`.
    pub(super) fn append(&mut self, parent: Node<'_, '_>, lines: &[String]) {
        if lines.is_empty() {
            return;
        }
        let Range { start, end } = parent.range();
        let last = parent.children().rfind(Node::is_element);
        if let Some(last) = last {
            let margin = self.margin(last.range().start);
            self.change(last.range().end..last.range().end, Self::lines(margin, lines));
            return;
        }
        let outer = self.margin(start).to_owned();
        let inner = if outer.is_empty() { String::new() } else { format!("{outer}  ") };
        let body = format!("{}{outer}", Self::lines(&inner, lines));
        if self.text[start..end].ends_with("/>") {
            let name = self.text[start + 1..].split([' ', '/', '>', '\n', '\t']).next();
            let close = format!(">{body}</{}>", name.unwrap_or_default());
            self.change(end - 2..end, close);
        } else {
            let close = start + self.text[start..end].rfind("</").expect("an end tag");
            let open = self.text[start..close].rfind('>').expect("a start tag") + 1 + start;
            // Nothing but blanks stands between, or text that is kept.
            let kept = self.text[open..close].trim_end().len();
            self.change(open + kept..close, body);
        }
    }

    /// Takes an element out, with the blanks before it.
    pub(super) fn remove(&mut self, node: Node<'_, '_>) {
        let Range { start, end } = node.range();
        let start = start - self.margin(start).len();
        self.change(start..end, String::new());
    }

    /// Takes an element out of another one, which is left without an end tag if nothing else is in
    /// it.
    pub(super) fn remove_from(&mut self, parent: Node<'_, '_>, node: Node<'_, '_>) {
        let is_blank = |other: Node<'_, '_>| {
            other == node || other.is_text() && other.text().unwrap_or_default().trim().is_empty()
        };
        match parent.first_child() {
            Some(first) if parent.children().all(is_blank) => {
                self.change(first.range().start - 1..parent.range().end, "/>".to_owned());
            }
            _ => self.remove(node),
        }
    }

    pub(super) fn set_attribute(&mut self, node: Node<'_, '_>, name: &str, value: &str) {
        match node.attribute_node(name) {
            Some(attribute) => {
                let range = attribute.range_value();
                // Its quotes stay as they are.
                let single = self.text[..range.start].ends_with('\'');
                let value = escape(value).replace('\'', if single { "&apos;" } else { "'" });
                self.change(range, value);
            }
            None => {
                let at = node.range().start + 1 + self.name_length(node);
                self.change(at..at, format!(" {name}=\"{}\"", escape(value)));
            }
        }
    }

    /// Another text in an element that has one, and nothing else.
    pub(super) fn set_text(&mut self, node: Node<'_, '_>, text: &str) {
        if let Some(there) = node.first_child().filter(Node::is_text) {
            self.change(there.range(), escape(text));
        }
    }

    fn name_length(&self, node: Node<'_, '_>) -> usize {
        let tag = &self.text[node.range().start + 1..];
        tag.find([' ', '/', '>', '\n', '\t', '\r']).unwrap_or(tag.len())
    }

    pub(super) fn add_namespace(&mut self, root: Node<'_, '_>, prefix: &str, uri: &str) {
        let at = root.range().start + 1 + self.name_length(root);
        self.change(at..at, format!(" xmlns:{prefix}=\"{uri}\""));
    }

    pub(super) fn remove_namespace(&mut self, root: Node<'_, '_>, uri: &str) {
        let tag = &self.text[root.range()];
        let tag = &tag[..tag.find('>').unwrap_or(tag.len())];
        let Some(prefix) = root.lookup_prefix(uri) else { return };
        for quote in ['"', '\''] {
            let declaration = format!(" xmlns:{prefix}={quote}{uri}{quote}");
            if let Some(at) = tag.find(&declaration) {
                let start = root.range().start + at;
                self.change(start..start + declaration.len(), String::new());
                return;
            }
        }
    }

    fn change(&mut self, range: Range<usize>, by: String) {
        self.changes.push((range, by));
    }

    pub(super) fn apply(mut self) -> String {
        // Those at one place stay in the order in which they were made.
        self.changes.sort_by_key(|(range, _)| range.start);
        let mut text = String::with_capacity(self.text.len() + 1024);
        let mut copied = 0;
        for (range, by) in self.changes {
            text += &self.text[copied..range.start];
            text += &by;
            copied = range.end;
        }
        text + &self.text[copied..]
    }
}
