"""Rows of the files in bench/results, and what the tables in docs/ say of them."""


def name(row):
    if row.get("format"):  # of a latent cache
        return row["format"]
    return row["format_k"] if row["format_k"] == row["format_v"] else f"{row['format_k']}:{row['format_v']}"


def share(row):
    part = row["gather_us"] / row["us"] if row.get("gather_us") else row["gbs"] / row["ceiling_gbs"]
    return f"{100 * part:.0f}%"


def us(row):
    return f"{row['us']:.1f}" if row["us"] < 1000 else f"{row['us']:.0f}"


def mark(text, met):
    """Bold where a goal is met."""
    return f"**{text}**" if met else text


def rows_of(report):
    """The rows of a report; halftone.compare has those of decode by case, with a label in place of fields."""
    rows = list(report.get("rows", ()))
    for case in report.get("cases", ()):
        shape = {key: value for key, value in case.items() if key not in ("name", "rows")}
        for row in case["rows"]:
            who, _, form = row["label"].rpartition(" ")
            rows.append({**shape, "format_k": form, "format_v": form, "us": row.get("us"),
                         **({"peer": who} if who != "halftone" else {})})
    return [row for row in rows if row.get("us")]
