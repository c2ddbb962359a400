"""Adult (census income): 123 binary features, 2 classes, from a9a or from the raw census rows.

Both give the same numbers: the raw rows are coded as LIBSVM's a9a was, categories one column each,
numbers cut at the quintiles of the training part. Binary features need no normalisation.
"""

import csv
import io
from bisect import bisect_right

import numpy as np
from numpy.typing import NDArray

from paceline.data import files, libsvm
from paceline.data.base import Dataset, Request, Rows
from paceline.data.fetch import RemoteFile, fetch_all

NUM_FEATURES = 123
PLACE = "https://www.csie.ntu.edu.tw/~cjlin/libsvmtools/datasets/binary"
FILES = (
    RemoteFile(name="a9a", urls=(f"{PLACE}/a9a",), digest="md5:fb3596510d780aaf76a06dc721d49662"),
    RemoteFile(
        name="a9a.t", urls=(f"{PLACE}/a9a.t",), digest="md5:f0bb16cf1ee3e80ff560e9d132ee647e"
    ),
)

# In the columns' order: an attribute's categories, or the first value of each bin but the first.
ATTRIBUTES: tuple[str | tuple[int, ...], ...] = (
    (26, 33, 41, 50),  # age
    "Private Self-emp-not-inc Self-emp-inc Federal-gov Local-gov State-gov Without-pay "
    "Never-worked",
    (106648, 158657, 196338, 259866),  # final weight
    "Bachelors Some-college 11th HS-grad Prof-school Assoc-acdm Assoc-voc 9th 7th-8th 12th Masters "
    "1st-4th 10th Doctorate 5th-6th Preschool",
    (9, 10, 11, 13),  # years of education
    "Married-civ-spouse Divorced Never-married Separated Widowed Married-spouse-absent "
    "Married-AF-spouse",
    "Tech-support Craft-repair Other-service Sales Exec-managerial Prof-specialty "
    "Handlers-cleaners Machine-op-inspct Adm-clerical Farming-fishing Transport-moving "
    "Priv-house-serv Protective-serv Armed-Forces",
    "Wife Own-child Husband Not-in-family Other-relative Unmarried",
    "White Asian-Pac-Islander Amer-Indian-Eskimo Other Black",
    "Female Male",
    (1,),  # capital gain
    (1,),  # capital loss
    (35, 40, 41, 48),  # hours per week
    "United-States Cambodia England Puerto-Rico Canada Germany Outlying-US(Guam-USVI-etc) India "
    "Japan Greece South China Cuba Iran Honduras Philippines Italy Poland Jamaica Vietnam Mexico "
    "Portugal Ireland France Dominican-Republic Laos Ecuador Taiwan Haiti Columbia Hungary "
    "Guatemala Nicaragua Scotland Thailand Yugoslavia El-Salvador Trinadad&Tobago Peru Hong "
    "Holand-Netherlands",
)


def load(request: Request) -> Dataset:
    """Open the training or the test part: a9a where it is found, else the raw rows."""
    folder = request.data_dir or fetch_all(FILES, files.cache_folder("adult"))
    coded, raw = ("a9a", "adult.data") if request.train else ("a9a.t", "adult.test")
    path = files.require(folder, coded, raw, name="adult")
    content = files.read(path)
    if path.name.startswith(coded):
        rows, signs = libsvm.parse(content, NUM_FEATURES)
        labels = (signs > 0).astype(np.int64)
    else:
        rows, labels = encode(content.decode())
    return Rows("adult", rows, labels, num_classes=2)


def encode(text: str) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """Code raw census rows as a9a does; an unknown value ("?") sets no column."""
    records = [
        row for row in csv.reader(io.StringIO(text), skipinitialspace=True) if len(row) == 15
    ]
    rows = np.zeros((len(records), NUM_FEATURES), np.float32)
    first_column = 0
    for position, attribute in enumerate(ATTRIBUTES):
        values = [record[position] for record in records]
        if isinstance(attribute, str):
            categories = attribute.split()
            column_of = {category: number for number, category in enumerate(categories)}
            columns = [column_of.get(value) for value in values]
            width = len(categories)
        else:
            columns = [bisect_right(attribute, float(value)) for value in values]
            width = len(attribute) + 1
        for row, column in enumerate(columns):
            if column is not None:
                rows[row, first_column + column] = 1
        first_column += width
    labels = np.array([record[-1].startswith(">50K") for record in records], np.int64)
    return rows, labels
