//! What `gatherflow plan` prints: buffers, buckets, order, memory, and what cannot help at this size (rule K1).

use std::fmt::{self, Write};

use super::{Across, BucketId, Bucketing, Plan};

const MEGA: f64 = 1e6;

/// Widest line of the gather order.
const COLUMNS: usize = 100;

impl Plan {
    /// What is worth saying once about this plan: settings that cannot help at this size are no errors (rule K1).
    pub fn hints(&self) -> Vec<String> {
        let mut hints = Vec::new();
        let buckets = self.buckets.len();
        if buckets == 0 {
            hints
                .push("no trainable parameter: this rank joins the small all-gather and has nothing else to do".into());
        }
        if self.ranks == 1 {
            hints.push("one rank: no communication, so there is nothing to hide".into());
        } else if self.data_parallel() == 1 {
            hints.push("one data-parallel rank: gathers and reduces move nothing, so there is nothing to hide".into());
        } else if buckets == 1 {
            hints.push(
                "one bucket: its gather has no other unit to hide under; ask for more buckets or a smaller bucket size"
                    .into(),
            );
        }
        if self.call_bytes > 0 && self.data_parallel() > 1 && buckets > 1 {
            match self.calls() {
                1 => hints.push(
                    "one call gathers all buckets, with no other unit to hide under: ask for a smaller `gather_group_bytes`"
                        .into(),
                ),
                calls if calls == buckets => hints.push(format!(
                    "`gather_group_bytes` = {}: no two neighbours in the gather order are that small together, so each \
                     bucket is gathered by itself",
                    self.call_bytes
                )),
                _ => {}
            }
        }
        match self.bucketing {
            Bucketing::Count(asked) if buckets > 0 && buckets < asked => hints.push(format!(
                "{asked} buckets were asked for, {buckets} came out: a parameter is never split over buckets"
            )),
            Bucketing::Count(asked) if buckets > asked => hints.push(format!(
                "{asked} buckets were asked for, {buckets} came out: each of {} buffers has a last bucket of its own",
                self.buffers.len()
            )),
            _ => {}
        }
        for (number, group) in self.shard_groups.iter().enumerate().skip(1) {
            if self.params.iter().all(|param| param.shard_group != number) {
                let name = group.name.as_deref().unwrap_or_default();
                hints.push(format!("shard group `{name}`: no parameter names it"));
            }
        }
        hints
    }

    /// The whole plan as text, ending in a newline: what `gatherflow plan` prints.
    pub fn describe(&self) -> String {
        self.to_string()
    }

    fn describe_head(&self, out: &mut String) -> fmt::Result {
        let numel =
            |trainable| -> usize { self.params.iter().filter(|p| p.trainable == trainable).map(|p| p.numel).sum() };
        let frozen = self.params.iter().filter(|p| !p.trainable).count();
        write!(
            out,
            "plan: {}, {}, {}, {} of {} elements",
            count(self.ranks, "rank"),
            count(self.chunks(), "chunk"),
            count(self.units.len(), "unit"),
            count(self.params.len() - frozen, "trainable parameter"),
            grouped(numel(true)),
        )?;
        if frozen > 0 {
            write!(out, ", {frozen} frozen of {}", grouped(numel(false)))?;
        }
        writeln!(out)?;
        if self.model_parallel > 1 {
            writeln!(out, "{} share a copy of the model", count(self.model_parallel, "rank"))?;
        }
        if self.pipeline.stages > 1 {
            let of_stage = count(self.tensor_parallel(), "rank");
            writeln!(out, "pipeline stage {} of {}, {of_stage} each", self.pipeline.stage, self.pipeline.stages)?;
        }
        for group in &self.shard_groups[1..] {
            let others = match group.across {
                _ if group.ranks == self.data_parallel() => "there are no others",
                Across::Replicas => "the others hold replicas",
                Across::Experts => "the others hold other parameters",
            };
            let name = group.name.as_deref().unwrap_or_default();
            let average = group.average_over;
            writeln!(out, "shard group {name}: {}, {others}, average over {average}", count(group.ranks, "rank"))?;
        }
        for set in &self.copies {
            let shared = set.first().and_then(|b| self.param(self.bucket(*b).params[0]).shared.as_deref());
            let buckets: Vec<String> = set.iter().map(|bucket| bucket.0.to_string()).collect();
            writeln!(out, "copies of {}: buckets {}", shared.unwrap_or_default(), buckets.join(", "))?;
        }
        if self.bucket_size < usize::MAX {
            writeln!(out, "a bucket closes at {} elements", grouped(self.bucket_size))?;
        } else {
            writeln!(out, "one bucket per buffer")?;
        }
        match self.calls() {
            calls if calls < self.order.len() => writeln!(out, "gathers in {}", count(calls, "call")),
            _ => Ok(()),
        }
    }

    fn buffer_table(&self) -> Table {
        let heads = ["buffer", "chunk", "parameters", "gradients", "count", "buckets", "elements", "owned"];
        let mut table = Table::new(&heads);
        for b in &self.buffers {
            table.row([
                b.index.0.to_string(),
                b.chunk.to_string(),
                b.dtype.to_string(),
                b.grad_dtype.to_string(),
                b.params.len().to_string(),
                b.buckets().len().to_string(),
                grouped(b.numel),
                grouped(b.owned_numel),
            ]);
        }
        if self.shard_groups.len() > 1 {
            let groups = self.buffers.iter().map(|b| self.shard_groups[b.shard_group].name.as_deref().unwrap_or("all"));
            table.column("shard group", groups);
        }
        table
    }

    fn bucket_table(&self) -> Table {
        let heads = ["bucket", "buffer", "place", "elements", "padding", "shard", "gather MB", "reduce MB"];
        let mut table = Table::new(&heads);
        table.left.push(2);
        for b in &self.buckets {
            let buffer = self.buffer(b.buffer);
            let place = self.unit(b.place);
            let megabytes = |element_bytes: usize| format!("{:.3}", (b.numel() * element_bytes) as f64 / MEGA);
            table.row([
                b.id.0.to_string(),
                b.buffer.0.to_string(),
                format!("{}/{}", place.chunk, place.name),
                grouped(b.numel()),
                grouped(b.padding()),
                grouped(b.shard_numel),
                megabytes(buffer.dtype.bytes()),
                megabytes(buffer.grad_dtype.bytes()),
            ]);
        }
        table
    }

    fn describe_other_storage(&self, out: &mut String) -> fmt::Result {
        let other = self.storage.other();
        let Some(memory) = self.memory_with(other) else {
            return writeln!(out, "storage {other}: not with gradients smaller than their parameters");
        };
        let total = memory.total_bytes();
        write!(out, "storage {other}: {} bytes", grouped(total))?;
        let staging = memory.staging_bytes();
        if staging > 0 {
            write!(out, ", of these {} staging", grouped(staging))?;
        }
        writeln!(out)
    }

    fn memory_table(&self) -> Table {
        let memory = self.memory();
        let mut table = Table::new(&["allocation", "bytes", ""]);
        table.left.push(0);
        for allocation in &memory.allocations {
            table.row([allocation.purpose.to_string(), grouped(allocation.bytes), human(allocation.bytes)]);
        }
        let total = memory.total_bytes();
        table.row(["total".into(), grouped(total), human(total)]);
        table
    }
}

impl fmt::Display for Plan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut out = String::new();
        self.describe_head(&mut out)?;
        if !self.buckets.is_empty() {
            writeln!(out, "\nbuffers")?;
            self.buffer_table().print(&mut out)?;
            writeln!(out, "\nbuckets (place: chunk/unit that reads them first)")?;
            self.bucket_table().print(&mut out)?;
            writeln!(out, "\ngather order (reduces run in reverse)")?;
            wrapped(&self.order, &mut out)?;
        }
        writeln!(out, "\nmemory per rank (storage {})", self.storage)?;
        self.memory_table().print(&mut out)?;
        self.describe_other_storage(&mut out)?;
        for (i, hint) in self.hints().iter().enumerate() {
            writeln!(out, "{}note: {hint}", if i == 0 { "\n" } else { "" })?;
        }
        f.write_str(&out)
    }
}

/// Columns as wide as their widest cell; numbers and short words to the right.
struct Table {
    rows: Vec<Vec<String>>,
    left: Vec<usize>,
}

impl Table {
    fn new(heads: &[&str]) -> Self {
        Self { rows: vec![heads.iter().map(ToString::to_string).collect()], left: Vec::new() }
    }

    fn row(&mut self, cells: impl Into<Vec<String>>) {
        self.rows.push(cells.into());
    }

    /// One more column at the end, to the left.
    fn column<'a>(&mut self, head: &'a str, cells: impl Iterator<Item = &'a str>) {
        self.left.push(self.rows[0].len());
        self.rows.iter_mut().zip(std::iter::once(head).chain(cells)).for_each(|(row, cell)| row.push(cell.to_owned()));
    }

    fn print(&self, out: &mut String) -> fmt::Result {
        let columns = self.rows.iter().map(Vec::len).max().unwrap_or(0);
        let width = |column: usize| {
            self.rows.iter().filter_map(|row| row.get(column)).map(|cell| cell.chars().count()).max().unwrap_or(0)
        };
        let widths: Vec<usize> = (0..columns).map(width).collect();
        for row in &self.rows {
            let mut line = String::new();
            for (column, (cell, &width)) in row.iter().zip(&widths).enumerate() {
                if self.left.contains(&column) {
                    write!(line, "  {cell:<width$}")?;
                } else {
                    write!(line, "  {cell:>width$}")?;
                }
            }
            writeln!(out, "{}", line.trim_end())?;
        }
        Ok(())
    }
}

fn wrapped(order: &[BucketId], out: &mut String) -> fmt::Result {
    let mut line = String::from(" ");
    for bucket in order {
        let word = bucket.0.to_string();
        if line.len() + 1 + word.len() > COLUMNS {
            writeln!(out, "{line}")?;
            line = String::from(" ");
        }
        line.push(' ');
        line.push_str(&word);
    }
    writeln!(out, "{line}")
}

/// `1 rank`, `2 ranks`.
fn count(n: usize, word: &str) -> String {
    format!("{n} {word}{}", if n == 1 { "" } else { "s" })
}

/// Digits in groups of three: `26 738 688`.
fn grouped(n: usize) -> String {
    let digits = n.to_string();
    let mut out = String::with_capacity(digits.len() + digits.len() / 3);
    for (i, digit) in digits.chars().enumerate() {
        if i > 0 && (digits.len() - i).is_multiple_of(3) {
            out.push(' ');
        }
        out.push(digit);
    }
    out
}

/// Bytes in a unit that keeps one to three digits before the point; empty below 1 kB.
fn human(bytes: usize) -> String {
    let bytes = bytes as f64;
    let units = [(1e12, "TB"), (1e9, "GB"), (MEGA, "MB"), (1e3, "kB")];
    let found = units.iter().find(|(size, _)| bytes >= *size);
    found.map_or_else(String::new, |(size, unit)| format!("{:.2} {unit}", bytes / size))
}

#[cfg(test)]
mod tests {
    use super::{grouped, human};

    #[test]
    fn numbers_are_grouped_by_three() {
        assert_eq!([0, 999, 1000, 26_738_688].map(grouped), ["0", "999", "1 000", "26 738 688"]);
    }

    #[test]
    fn bytes_get_the_largest_unit_that_fits() {
        assert_eq!([64, 1000, 26_738_688, 80_000_000_000].map(human), ["", "1.00 kB", "26.74 MB", "80.00 GB"]);
    }
}
